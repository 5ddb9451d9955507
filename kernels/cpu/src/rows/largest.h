// The largest number of each row, as greedy decoding asks for it.
#pragma once

#include "../machine/pool.h"

namespace penstock {

struct Largest {
  float value;
  int64_t place;
};

// The largest value of a row, and the first place it stands at. What is not a number is larger than
// every number. `columns` is at least 1.
Largest largest_of(const float* row, int64_t columns);

// Whether what was found further on in the same row takes the place of what was found before.
inline bool exceeds(const Largest& later, const Largest& found) {
  return found.value == found.value &&
         (later.value > found.value || later.value != later.value);
}

// The same of `count` rows of `columns` floats, `stride` floats apart.
void largest(Pool& pool, const float* rows, int64_t count, int64_t columns, int64_t stride,
             float* values, int64_t* places);

}  // namespace penstock
