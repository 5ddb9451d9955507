// What the register tiles of linear.cpp and coded_linear.cpp have in common.
#pragma once

#include "../machine/vec.h"

namespace penstock {

// Rows of a register tile: 2 * MOST_ROWS accumulators of sixteen floats and what feeds them.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12;
#elif defined(__AVX2__) || defined(__ARM_NEON)
constexpr int MOST_ROWS = 3;
#else
constexpr int MOST_ROWS = 1;
#endif

// Bytes, when each weight is used once. The more rows, the longer a line of weights takes, and the
// fewer of them the CPU's own prefetcher asks for in time.
constexpr int64_t AHEAD_FEW_ROWS = 2048, AHEAD = 8192, FEW_ROWS = 4;
constexpr int64_t FEW_PRODUCTS = 2;  // instructions for each line of weights

// Rows of a register tile over weights that are not coded. With sixteen registers, six rows of half
// a panel load less for each product than three of a whole one. So the halves lie one behind the
// other.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool HALVES_APART = true;
constexpr int TILE_ROWS = 6;
#else
constexpr bool HALVES_APART = false;
constexpr int TILE_ROWS = MOST_ROWS;
#endif

// What a tile fetches ahead: two lines with each step, or the first alone.
struct Fetch {
  const char* from;
  int64_t second;  // bytes from the first line to the second
  int64_t stride;  // bytes from step to step
};

}  // namespace penstock
