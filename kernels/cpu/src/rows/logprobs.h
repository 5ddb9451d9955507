// Log-probabilities of chosen tokens, and of the most likely ones.
#pragma once

#include <cstdint>

#include "../machine/pool.h"
#include "scores.h"

namespace penstock {

// Of `count` rows: each one's chosen token, and how many of the most likely ones.
struct Reports {
  int64_t count;
  const int64_t *rows, *tokens;
  int64_t width;
};

// Writes `chosen` [count], and `values` and `ids` [count][width], most likely first, of equals the lowest
// id first. Zeros where the row's largest logit is not finite. Throws std::bad_alloc.
void logprobs(Pool& pool, const Logits& logits, const Reports& reports, float* chosen, float* values,
              int64_t* ids);

}  // namespace penstock
