// What the register tiles of linear.cpp and coded_linear.cpp have in common.
#pragma once

#include "vec.h"

namespace penstock {

// Rows of a register tile: 2 * MOST_ROWS accumulators of sixteen floats and what feeds them.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12;
#elif defined(__AVX2__) || defined(__ARM_NEON)
constexpr int MOST_ROWS = 3;
#else
constexpr int MOST_ROWS = 1;
#endif

// Bytes, when each weight is used once. The more rows, the longer a step takes, and the fewer lines
// the CPU's own prefetcher asks for in time.
constexpr int64_t AHEAD_FEW_ROWS = 2048, AHEAD = 8192, FEW_ROWS = 4;

// What a tile fetches ahead: two lines with each step.
struct Fetch {
  const char* from;
  int64_t second;  // bytes from the first line to the second
  int64_t stride;  // bytes from step to step
};

}  // namespace penstock
