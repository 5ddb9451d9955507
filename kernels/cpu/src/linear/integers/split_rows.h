// Activations as whole numbers of fifteen bits, for products of integers.
//
// The inputs x of a row are cut into pieces of 1024. A piece has a scale s, its largest magnitude
// over 16383. Each input becomes the number q = round(x / s) = 128 * high + low, of two signed
// bytes. So an input is at most s / 2 off: sixty times less than bf16 rounds the piece's largest.
// Sums of the numbers from the row's beginning, at every 32nd input, give those of any part.
//
// A row's memory: all high bytes, all low bytes, scales, sums. Where the CPU has no products of bytes
// that cannot overflow, numbers are not cut in two but words.
#pragma once

#include "../../machine/rounding.h"
#include "../../machine/vec.h"

namespace penstock {

constexpr int64_t SPLIT_PIECE = 1024, SPLIT_SUM = 32;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PENSTOCK_BYTE_DOT 1
#elif defined(__AVX2__) && defined(__FMA__)
#define PENSTOCK_WORD_DOT 1
#endif
#if defined(PENSTOCK_BYTE_DOT)
constexpr bool HAS_BYTE_DOT = true, HAS_INTEGER_DOT = true;
#elif defined(PENSTOCK_WORD_DOT)
constexpr bool HAS_BYTE_DOT = false, HAS_INTEGER_DOT = true;
#else
constexpr bool HAS_BYTE_DOT = false, HAS_INTEGER_DOT = false;
#endif

// From one number of a row to the next: high bytes and low bytes lie apart.
constexpr int64_t SPLIT_NUMBER_BYTES = HAS_BYTE_DOT ? 1 : 2;

struct SplitRow {
  int64_t columns;

  constexpr int64_t low_at() const { return rounded_up(columns, 64); }
  constexpr int64_t scales_at() const { return 2 * low_at(); }
  constexpr int64_t pieces() const { return divided_up(columns, SPLIT_PIECE); }
  constexpr int64_t sums_at() const { return scales_at() + rounded_up(4 * pieces(), 64); }
  constexpr int64_t bytes() const { return sums_at() + 4 * (divided_up(columns, SPLIT_SUM) + 1); }

  // Of floats, which have room for whole vectors. What is not finite makes the piece NaN.
  void fill(const float* x, char* row) const;
};

}  // namespace penstock
