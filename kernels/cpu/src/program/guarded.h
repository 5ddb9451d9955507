// How a function of the C interface says what went wrong.
#pragma once

#include <cstdio>
#include <exception>
#include <new>

namespace penstock {

struct Error {
  char text[256];
};

template <class Function>
int guarded(Error* error, Function function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    std::snprintf(error->text, sizeof error->text, "out of memory");
  } catch (const std::exception& e) {
    std::snprintf(error->text, sizeof error->text, "%s", e.what());
  }
  return -1;
}

}  // namespace penstock
