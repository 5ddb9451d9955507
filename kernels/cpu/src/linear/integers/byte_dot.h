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
  static constexpr int MIDDLE_BITS = 3;  // weights have 2 ** 3 more than their values
  static void load(const char* w, __m512i& lo, __m512i& hi) {
    const __m512i both = _mm512_loadu_si512(w), low = _mm512_set1_epi8(15);
    lo = _mm512_and_si512(both, low);
    hi = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
  }
};

struct EightBits {
  static constexpr int64_t BYTES = 128;
  static constexpr int MIDDLE_BITS = 7;
  static void load(const char* w, __m512i& lo, __m512i& hi) {
    lo = _mm512_loadu_si512(w);
    hi = _mm512_loadu_si512(w + 64);
  }
};

// ---- tiles

// Rows of a tile: sums of products take two registers of each. So do a piece's totals, where it has
// several parts and the tile CARRIES them from one to the next.
constexpr bool CAN_CARRY = true;
template <bool CARRIES>
constexpr int INTEGER_TILE_ROWS = CARRIES ? 6 : 12;

// Few rows: both bytes of an activation in one pass, in registers of their own.
template <bool CARRIES>
constexpr int FEW = CARRIES ? 3 : 5;

template <bool CARRIES>
constexpr int passes(int64_t rows) { return rows <= FEW<CARRIES> ? 1 : 2; }

inline __m512i four_inputs(const char* row) {
  return _mm512_set1_epi32(static_cast<int32_t>(*reinterpret_cast<const LooseWord*>(row)));
}

// sums [ROWS][EACH] += weights times the bytes at `input`, and, if EACH is 4, the last two times those
// `low_at` bytes behind them.
template <class Weights, int ROWS, int EACH>
inline void add_products(const char* w, int64_t steps, const char* input, int64_t stride,
                         int64_t low_at, Fetch& fetch, __m512i (&sum)[ROWS][EACH]) {
  // A pointer to every third row: the two after it are reached by scaled addressing.
  const char *a = input, *b = a + 3 * stride, *c = a + 6 * stride, *d = a + 9 * stride;
  for (int64_t s = 0; s < steps; s++, w += Weights::BYTES) {
    __m512i w_lo, w_hi;
    Weights::load(w, w_lo, w_hi);
    prefetch(fetch.from);
    if (Weights::BYTES > 64) prefetch(fetch.from + fetch.second);
    fetch.from += fetch.stride;
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

// What the middle of the weights adds to all sums of a row.
template <class Weights>
inline __m512i share_of_middle(const Part& part, const char* row) {
  const __m512i end = _mm512_set1_epi32(sum_before(row + part.last_sum_at));
  const __m512i begin = _mm512_set1_epi32(sum_before(row + part.sum_at));
  return _mm512_slli_epi32(_mm512_sub_epi32(end, begin), Weights::MIDDLE_BITS);
}

// ROWS rows and a panel. A part may have no more than 16 steps, so that storing its sums would take a
// tenth of its time. They stay in registers until a piece of activations ends.
template <class Weights, int ROWS, bool CARRIES>
void tile(Parts parts, const char* input, int64_t stride, int64_t low_at, bool offsets, float* sums,
          Ahead ahead) {
  constexpr int EACH = ROWS <= FEW<CARRIES> ? 4 : 2;
  Fetch fetch = ahead.fetch;
  Vec total[ROWS][2];
  while (parts.are_left()) {
    const Part part = parts.next(input);
    if (ahead.distance) fetch = ahead.of(part, Weights::BYTES);
    __m512i sum[ROWS][EACH];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int i = 0; i < EACH; i++) sum[r][i] = _mm512_setzero_si512();
    add_products<Weights, ROWS, EACH>(part.weights, part.steps, part.input, stride, low_at,
                                      fetch, sum);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const __m512i rest = share_of_middle<Weights>(part, part.input + r * stride);
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        // 128 times the high bytes' products.
        sum[r][i] = _mm512_sub_epi32(_mm512_slli_epi32(sum[r][i], 7), rest);
        if (EACH == 4) sum[r][i] = _mm512_add_epi32(sum[r][i], sum[r][EACH - 2 + i]);
      }
    }
    if (EACH == 2)
      add_products<Weights, ROWS, EACH>(part.weights, part.steps, part.input + low_at, stride, 0,
                                        fetch, sum);
    if (!CARRIES || part.begins_piece)
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = set1(0.f);
    const Vec scale[2] = {load(part.header), load(part.header + LANES * 4)};
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++)
        total[r][i] = with_part(part, part.input + r * stride, offsets, i, scale[i],
                                _mm512_cvtepi32_ps(sum[r][i]), total[r][i]);
    if (!CARRIES || part.ends_piece)
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++)
          end_piece(part, part.input + r * stride, total[r][i], sums + r * PANEL + i * LANES);
  }
}

}  // namespace
}  // namespace penstock
