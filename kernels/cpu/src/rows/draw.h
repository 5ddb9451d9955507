// Draws a token from each row of logits: temperature, top-k, top-p, min-p, then the Gumbel-max trick.
#pragma once

#include <cstdint>

#include "../machine/pool.h"
#include "scores.h"

namespace penstock {

// How `count` of the rows are drawn from; arrays have an entry for each of them.
struct Draws {
  int64_t count;
  const int64_t* rows;
  const float* temperature;  // positive
  // Names the random numbers: of a request, of its output and token.
  const int64_t *seeds, *choices, *indexes;
  int64_t stream;
  // A row is drawn from whole where top_k is 0, top_p is 1 and log_min_p is -inf. The first two are
  // null together; log_min_p may be null alone.
  const int64_t* top_k;
  const double* top_p;
  const float* log_min_p;
};

// The token of each draw; 0 where the row's largest logit is not finite. A token depends on its row,
// its options and its random numbers alone. gumbel_sampling.py has the formulas.
// Throws std::bad_alloc.
void draw(Pool& pool, const Logits& logits, const Draws& draws, int64_t* tokens);

}  // namespace penstock
