// The register tile over weights that lie in full: some rows times steps of a panel.
#pragma once

#include "linear.h"
#include "tiles.h"

namespace penstock {

constexpr int HALVES = HALVES_APART ? 1 : 2;             // of a panel, which a tile multiplies
constexpr int64_t TILE_BYTES = STEP_BYTES / 2 * HALVES;  // from one step of a tile to the next

// ---- how a step of weights meets a row

// Every kind gives sixteen weights of one of a step's INPUTS, and multiplies them with that input.
struct Floats {
  static constexpr int INPUTS = 1;
  static Vec weights(const char* w, int) { return load(w); }
  static void multiply(Vec x, Vec w, Vec& sum) { add_product(x, w, sum); }
};

struct Widened {
  static constexpr int INPUTS = 2;
  static Vec weights(const char* w, int input) {
    // Loaded for each input anew: registers for both are not to be had everywhere.
    asm volatile("" : "+r"(w));
    return input ? load_odd(w) : load_even(w);
  }
  static void multiply(Vec x, Vec w, Vec& sum) { add_product(x, w, sum); }
};

#if defined(__AVX512BF16__)
// Two inputs are one here: what lies in four bytes.
struct Halves {
  static constexpr int INPUTS = 1;
  static Vec weights(const char* w, int) { return load(w); }
  static void multiply(Vec x, Vec w, Vec& sum) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
  }
};
#else
using Halves = Widened;
#endif

// ROWS rows times `steps` steps of a panel, or of a half of it. `sums` [ROWS][32] is where the chains
// end, and where they went on from if RESUME.
template <class Step, int ROWS, bool RESUME>
void full_tile(const char* input, int64_t stride, const char* weights, int64_t steps, float* sums,
          Fetch fetch) {
  constexpr int INPUT_BYTES = 4 * Step::INPUTS;
  Vec sum[ROWS][HALVES];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++)
      sum[r][h] = RESUME ? load(sums + r * PANEL + h * LANES) : set1(0.f);
  // A pointer to every third row: the two after it are reached by scaled addressing.
  const char *a = input, *b = input + 3 * stride, *c = input + 6 * stride, *d = input + 9 * stride;
  for (int64_t s = 0; s < steps; s++, weights += TILE_BYTES) {
    prefetch(fetch.from);
    if (HALVES == 2) prefetch(fetch.from + fetch.second);
    fetch.from += fetch.stride;
#pragma GCC unroll 2
    for (int i = 0; i < Step::INPUTS; i++) {
      Vec w[HALVES];
#pragma GCC unroll 2
      for (int h = 0; h < HALVES; h++) w[h] = Step::weights(weights + h * (STEP_BYTES / 2), i);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const char* third = r < 3 ? a : r < 6 ? b : r < 9 ? c : d;
        const char* at = third + (r % 3) * stride + s * INPUT_BYTES + 4 * i;
        const Vec x = set1(*reinterpret_cast<const LooseFloat*>(at));
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) Step::multiply(x, w[h], sum[r][h]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++) store(sums + r * PANEL + h * LANES, sum[r][h]);
}

using FullTile = void (*)(const char*, int64_t, const char*, int64_t, float*, Fetch);

template <class Step, bool RESUME>
FullTile full_tile_of(int64_t rows) {
  static_assert(TILE_ROWS <= 12, "a case for each number of rows");
  switch (rows) {
    case 1: return full_tile<Step, 1, RESUME>;
#define PENSTOCK_ROWS(n) \
  case n:                \
    return full_tile<Step, n <= TILE_ROWS ? n : 1, RESUME>;
    PENSTOCK_ROWS(2) PENSTOCK_ROWS(3) PENSTOCK_ROWS(4) PENSTOCK_ROWS(5) PENSTOCK_ROWS(6)
    PENSTOCK_ROWS(7) PENSTOCK_ROWS(8) PENSTOCK_ROWS(9) PENSTOCK_ROWS(10) PENSTOCK_ROWS(11)
#undef PENSTOCK_ROWS
    default: return full_tile<Step, TILE_ROWS, RESUME>;
  }
}

}  // namespace penstock
