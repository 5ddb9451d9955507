// Whole numbers multiplied as words of sixteen bits: two inputs at once, both factors with a sign.
//
// For CPUs without VNNI. Their products of bytes are summed in sixteen bits, where 255 * 127 * 2
// overflows. Sums of words have 32, and 2 * 16383 * 128 does not come near their end. A register of
// weights is spread to words when it is loaded, and a number of activations is one factor instead
// of two.
//
// Included by integer_linear.cpp alone.
#pragma once

#include "integer_tile.h"

namespace penstock {
namespace {

// ---- registers

#if defined(__AVX512BW__)
using Words = __m512i;
inline Words widened(const char* bytes) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
}
// Of each word the four bits of that number, 0 .. 3.
inline Words nibbles(const char* words, int number) {
  const __m512i shifted = _mm512_srli_epi16(_mm512_loadu_si512(words), 4 * number);
  return number == 3 ? shifted : _mm512_and_si512(shifted, _mm512_set1_epi16(15));
}
inline Words two_inputs(const char* row) {
  return _mm512_set1_epi32(static_cast<int32_t>(*reinterpret_cast<const LooseWord*>(row)));
}
inline Words add_products(Words sum, Words w, Words x) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
}
inline Words zero() { return _mm512_setzero_si512(); }
inline Words minus(Words sum, int32_t rest) {
  return _mm512_sub_epi32(sum, _mm512_set1_epi32(rest));
}
#else
using Words = __m256i;
inline Words widened(const char* bytes) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
inline Words nibbles(const char* words, int number) {
  const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  const __m256i shifted = _mm256_srli_epi16(all, 4 * number);
  return number == 3 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi16(15));
}
inline Words two_inputs(const char* row) {
  return _mm256_set1_epi32(static_cast<int32_t>(*reinterpret_cast<const LooseWord*>(row)));
}
inline Words add_products(Words sum, Words w, Words x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
}
inline Words zero() { return _mm256_setzero_si256(); }
inline Words minus(Words sum, int32_t rest) {
  return _mm256_sub_epi32(sum, _mm256_set1_epi32(rest));
}
#endif

// ---- weights: a slice of a unit has two registers of outputs for each of its two pairs of inputs

constexpr int64_t COLUMNS = WORD_REGISTER_BYTES / 2;  // outputs of a slice
constexpr int SLICES = PANEL / COLUMNS;
static_assert(sizeof(Words) == WORD_REGISTER_BYTES, "the layout is that of the registers");

struct FourBits {
  static constexpr int64_t BYTES = 64, SLICE_BYTES = 2 * COLUMNS;
  static constexpr int32_t MIDDLE = 8;  // what weights have more than their values
  static Words load(const char* w, int number) { return nibbles(w, number); }
};

struct EightBits {
  static constexpr int64_t BYTES = 128, SLICE_BYTES = 4 * COLUMNS;
  static constexpr int32_t MIDDLE = 0;
  static Words load(const char* w, int number) { return widened(w + number * COLUMNS); }
};

// ---- tiles

constexpr bool CAN_CARRY = false;  // totals are in memory

#if defined(__AVX512BW__)
template <bool>
constexpr int INTEGER_TILE_ROWS = 12;
#else
template <bool>
constexpr int INTEGER_TILE_ROWS = 6;
#endif

// Few rows: all slices in one pass, in registers of their own.
template <bool>
constexpr int FEW = 2;

template <bool>
constexpr int passes(int64_t rows) { return rows <= FEW<false> ? 1 : SLICES; }

// The sums of a slice's two registers, of the half of the panel that they hold, or one of them.
inline Vec as_floats(const Words (&sum)[2], int half) {
#if defined(__AVX512BW__)
  return _mm512_cvtepi32_ps(sum[half]);
#else
  (void)half;
  return Vec{_mm256_cvtepi32_ps(sum[0]), _mm256_cvtepi32_ps(sum[1])};
#endif
}

// TOGETHER slices from `first`. `totals` [ROWS][32] are of the piece of activations.
template <class Weights, int ROWS, int TOGETHER>
inline void add_slices(const Part& part, int64_t stride, bool offsets, int first, float* totals,
                       Fetch& fetch) {
  Words sum[ROWS][TOGETHER][2];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int j = 0; j < TOGETHER; j++) sum[r][j][0] = sum[r][j][1] = zero();
  // A pointer to every third row: the two after it are reached by scaled addressing.
  const char *a = part.input, *b = a + 3 * stride, *c = a + 6 * stride, *d = a + 9 * stride;
  const char* w = part.weights + first * Weights::SLICE_BYTES;
  for (int64_t s = 0; s < part.steps; s++, w += Weights::BYTES) {
    prefetch(fetch.from);
    if (Weights::BYTES > 64) prefetch(fetch.from + fetch.second);
    fetch.from += fetch.stride;
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; pair++) {
      Words weights[TOGETHER][2];
#pragma GCC unroll 2
      for (int j = 0; j < TOGETHER; j++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++)
          weights[j][i] = Weights::load(w + j * Weights::SLICE_BYTES, 2 * pair + i);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const char* third = r < 3 ? a : r < 6 ? b : r < 9 ? c : d;
        const Words x = two_inputs(third + (r % 3) * stride + 8 * s + 4 * pair);
#pragma GCC unroll 2
        for (int j = 0; j < TOGETHER; j++)
#pragma GCC unroll 2
          for (int i = 0; i < 2; i++) {
            sum[r][j][i] = add_products(sum[r][j][i], weights[j][i], x);
            // Else GCC adds products to products first, and has not the registers for that.
            asm("" : "+v"(sum[r][j][i]));
          }
      }
    }
  }
  constexpr int HALVES = COLUMNS / LANES;  // of the panel in a slice
#pragma GCC unroll 2
  for (int j = 0; j < TOGETHER; j++)
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++) {
      const int half = (first + j) * HALVES + h;
      const Vec scale = load(part.header + half * LANES * 4);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const char* const row = part.input + r * stride;
        const auto numbers = static_cast<uint32_t>(sum_of_numbers(part, row));
        const auto rest = static_cast<int32_t>(static_cast<uint32_t>(Weights::MIDDLE) * numbers);
        const Words whole[2] = {minus(sum[r][j][0], rest), minus(sum[r][j][1], rest)};
        float* const at = totals + r * PANEL + half * LANES;
        store(at, with_part(part, row, offsets, half, scale, as_floats(whole, h),
                            part.begins_piece ? set1(0.f) : load(at)));
      }
    }
}

template <class Weights, int ROWS, bool>
void tile(Parts parts, const char* input, int64_t stride, int64_t, bool offsets, float* sums,
          Ahead ahead) {
  constexpr int TOGETHER = ROWS <= FEW<false> ? SLICES : 1;
  Fetch fetch = ahead.fetch;
  alignas(64) float totals[ROWS * PANEL];
  while (parts.are_left()) {
    const Part part = parts.next(input);
    if (ahead.distance) fetch = ahead.of(part, Weights::BYTES);
    for (int first = 0; first < SLICES; first += TOGETHER)
      add_slices<Weights, ROWS, TOGETHER>(part, stride, offsets, first, totals, fetch);
    if (!part.ends_piece) continue;
    for (int r = 0; r < ROWS; r++)
      for (int at = r * PANEL; at < (r + 1) * PANEL; at += LANES)
        end_piece(part, part.input + r * stride, load(totals + at), sums + at);
  }
}

}  // namespace
}  // namespace penstock
