// Products of query rows with a span of cached keys, and of its weights with the cached values.
#pragma once

#include "cached_keys.h"
#include "kv_layout.h"

namespace penstock {

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12;
#elif defined(__AVX2__) || defined(__ARM_NEON)
constexpr int MOST_ROWS = 3;
#else
constexpr int MOST_ROWS = 1;
#endif

// Groups of a span. Its bounds are multiples of that from a sequence's beginning, wherever a row or
// its window ends: the order of sums is part of a row's bits.
constexpr int64_t SPAN = 16;
constexpr int64_t SCORE_STRIDE = SPAN * GROUP + LANES;  // floats; an odd number of cache lines
constexpr int AHEAD = 6;                                // groups fetched before they are needed

// Scores of ROWS queries with GROUPS groups of keys; group g is at groups[g], and groups[g + AHEAD]
// is what to fetch meanwhile.
template <class Keys, int ROWS, int GROUPS>
void score(const char* query, int64_t stride, const char* const* groups, int64_t words,
           float* scores) {
  Vec sums[ROWS][GROUPS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) sums[r][g] = set1(0.f);
  const char *a = query, *b = query + 3 * stride, *c = query + 6 * stride, *d = query + 9 * stride;
  for (int64_t w = 0; w < words; w++) {
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      const Keys keys(groups[g] + w * Keys::KEY_BYTES);
      if (w * Keys::KEY_BYTES % 64 == 0) prefetch(groups[g + AHEAD] + w * Keys::KEY_BYTES);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const char* third = r < 3 ? a : r < 6 ? b : r < 9 ? c : d;
        keys.multiply(third + (r % 3) * stride + w * Keys::QUERY_BYTES, sums[r][g]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      if (Keys::SCALED) sums[r][g] = sums[r][g] * scales(groups[g] + words * Keys::KEY_BYTES);
      store(scores + r * SCORE_STRIDE + g * GROUP, sums[r][g]);
    }
}

// Groups of keys and values, one after another.
struct Span {
  const char* const* values;  // [count + AHEAD]
  int64_t count;
  int64_t positions[SPAN];  // of each group's first key
  int64_t keys[SPAN];       // in each group, as far as any row sees them
};

// Adds the weighted values of a span to ROWS outputs, VECTORS * 16 dims from byte `at` of a value.
template <class Keys, int ROWS, int VECTORS>
void weigh(const float* weights, const Span& span, int64_t at, int64_t value_bytes, float* output,
           int64_t stride) {
  Vec sums[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load(output + r * stride + v * LANES);
  const float *a = weights, *b = a + 3 * SCORE_STRIDE, *c = a + 6 * SCORE_STRIDE,
              *d = a + 9 * SCORE_STRIDE;
  for (int64_t g = 0; g < span.count; g++) {
    const char* value = span.values[g] + at;
    const char* next = span.values[g + AHEAD] + at;
    const int64_t keys = span.keys[g];
    for (int64_t k = 0; k < keys; k++, value += value_bytes, next += value_bytes) {
      Vec x[VECTORS];
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) {
        x[v] = Keys::values(value + v * LANES * Keys::VALUE_BYTES);
        prefetch(next + v * LANES * Keys::VALUE_BYTES);
      }
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const float* third = r < 3 ? a : r < 6 ? b : r < 9 ? c : d;
        const Vec weight = set1(third[(r % 3) * SCORE_STRIDE + g * GROUP + k]);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sums[r][v] = fma(weight, x[v], sums[r][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) store(output + r * stride + v * LANES, sums[r][v]);
}

#define PENSTOCK_EACH_ROWS(CASE)                                                             \
  CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) \
      CASE(12)

template <class Keys, int ROWS>
void score_span(const char* query, int64_t stride, const char* const* groups, int64_t count,
                int64_t words, float* scores) {
  constexpr int WIDE = 2 * ROWS <= MOST_ROWS ? 4 : MOST_ROWS > 1 ? 2 : 1;
  int64_t g = 0;
  for (; g + WIDE <= count; g += WIDE)
    score<Keys, ROWS, WIDE>(query, stride, groups + g, words, scores + g * GROUP);
  for (; g < count; g++)
    score<Keys, ROWS, 1>(query, stride, groups + g, words, scores + g * GROUP);
}

template <class Keys>
void score_rows(int rows, const char* query, int64_t stride, const char* const* groups,
                int64_t count, int64_t words, float* scores) {
  switch (rows) {
#define PENSTOCK_CASE(n) \
  case n:                \
    return score_span<Keys, (n <= MOST_ROWS ? n : 1)>(query, stride, groups, count, words, scores);
    PENSTOCK_EACH_ROWS(PENSTOCK_CASE)
#undef PENSTOCK_CASE
  }
}

template <class Keys, int VECTORS>
void weigh_rows(int rows, const float* weights, const Span& span, int64_t at, int64_t value_bytes,
                float* output, int64_t stride) {
  switch (rows) {
#define PENSTOCK_CASE(n) \
  case n:                \
    return weigh<Keys, (n <= MOST_ROWS ? n : 1), VECTORS>(weights, span, at, value_bytes, output, stride);
    PENSTOCK_EACH_ROWS(PENSTOCK_CASE)
#undef PENSTOCK_CASE
  }
}

}  // namespace penstock
