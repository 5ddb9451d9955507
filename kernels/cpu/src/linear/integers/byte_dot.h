// Whole numbers multiplied as bytes, with VNNI: four inputs at once, high and low bytes apart.
//
// Included by integer_linear.cpp alone.
#pragma once

#include "integer_tile.h"

namespace penstock {
namespace {

// ---- 32 outputs of four inputs, as bytes without a sign

struct FourBits {
  static constexpr int64_t BYTES = 64;
  static void load(const char* w, __m512i& lo, __m512i& hi) {
    const __m512i both = _mm512_loadu_si512(w), low = _mm512_set1_epi8(15);
    lo = _mm512_and_si512(both, low);
    hi = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
  }
};

struct EightBits {
  static constexpr int64_t BYTES = 128;
  static void load(const char* w, __m512i& lo, __m512i& hi) {
    lo = _mm512_loadu_si512(w);
    hi = _mm512_loadu_si512(w + 64);
  }
};

// ---- tiles

constexpr int INTEGER_TILE_ROWS = 12;

inline __m512i four_inputs(const char* row) {
  return _mm512_set1_epi32(static_cast<int32_t>(*reinterpret_cast<const LooseWord*>(row)));
}

// Few rows: both bytes of an activation in one pass, in registers of their own.
constexpr int FEW = 5;

// sums [ROWS][EACH] += weights times the bytes at `input`, and, if EACH is 4, the last two times those
// `low_at` bytes behind them.
template <class Weights, int ROWS, int EACH>
inline void add_products(const char* w, int64_t steps, const char* input, int64_t stride,
                         int64_t low_at, const char* ahead, __m512i (&sum)[ROWS][EACH]) {
  // A pointer to every third row: the two after it are reached by scaled addressing.
  const char *a = input, *b = a + 3 * stride, *c = a + 6 * stride, *d = a + 9 * stride;
  for (int64_t s = 0; s < steps; s++, w += Weights::BYTES, ahead += Weights::BYTES) {
    __m512i w_lo, w_hi;
    Weights::load(w, w_lo, w_hi);
    prefetch(ahead);
    if (Weights::BYTES > 64) prefetch(ahead + 64);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const char* at = (r < 3 ? a : r < 6 ? b : r < 9 ? c : d) + (r % 3) * stride + 4 * s;
      const __m512i x = four_inputs(at);
      sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], w_lo, x);
      sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], w_hi, x);
      if (EACH == 4) {
        const __m512i y = four_inputs(at + low_at);
        sum[r][EACH - 2] = _mm512_dpbusd_epi32(sum[r][EACH - 2], w_lo, y);
        sum[r][EACH - 1] = _mm512_dpbusd_epi32(sum[r][EACH - 1], w_hi, y);
      }
    }
  }
  // Where their lives in the loop end: otherwise GCC 12 copies every sum in each of its rounds.
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int i = 0; i < EACH; i++) asm("" : "+v"(sum[r][i]));
}

// 128 times the high bytes' products; what the middle of the weights adds to all is taken off.
inline __m512i shifted(__m512i sum, int32_t rest) {
  return _mm512_sub_epi32(_mm512_slli_epi32(sum, 7), _mm512_set1_epi32(rest));
}

template <class Weights, int ROWS>
void tile(const Part& part, int64_t stride, float* sums, const char* ahead) {
  constexpr int EACH = ROWS <= FEW ? 4 : 2;
  __m512i sum[ROWS][EACH];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int i = 0; i < EACH; i++) sum[r][i] = _mm512_setzero_si512();
  add_products<Weights, ROWS, EACH>(part.weights, part.steps, part.input, stride, part.low_at,
                                    ahead, sum);
  uint32_t numbers[ROWS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) {
    const char* row = part.input + r * stride;
    numbers[r] = sum_of_numbers(part, row);
    const auto rest = static_cast<int32_t>(static_cast<uint32_t>(part.middle) * numbers[r]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      sum[r][i] = shifted(sum[r][i], rest);
      if (EACH == 4) sum[r][i] = _mm512_add_epi32(sum[r][i], sum[r][EACH - 2 + i]);
    }
  }
  if (EACH == 2)
    add_products<Weights, ROWS, EACH>(part.weights, part.steps, part.input + part.low_at, stride,
                                      0, part.weights, sum);
  const Vec scale[2] = {load(part.header), load(part.header + LANES * 4)};
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++, sums += PANEL)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
      add_share(part, part.input + r * stride, i, numbers[r], scale[i],
                _mm512_cvtepi32_ps(sum[r][i]), sums + i * LANES);
}

}  // namespace
}  // namespace penstock
