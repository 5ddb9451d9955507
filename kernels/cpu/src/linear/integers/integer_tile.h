// What the ways of multiplying whole numbers have in common; see byte_dot.h and word_dot.h.
//
// Included by integer_linear.cpp alone.
#pragma once

#include "../linear.h"

namespace penstock {
namespace {

// A part of the inputs with one scale of activations and one of each output.
struct Part {
  const char* weights;
  int64_t steps;       // of four inputs
  const char* header;  // scales, then offsets if there are any
  bool offsets;
  int32_t middle;      // what weights have more than their values
  const char* input;   // numbers of the first row, or their high bytes
  int64_t low_at, scale_at, sum_at, last_sum_at;  // bytes from there
  bool first;
};

// The sum of a row's numbers in the part.
inline uint32_t sum_of_numbers(const Part& part, const char* row) {
  return *reinterpret_cast<const LooseWord*>(row + part.last_sum_at) -
         *reinterpret_cast<const LooseWord*>(row + part.sum_at);
}

// sums [16] += the part's share, of outputs in a half of the panel (0 or 1).
inline void add_share(const Part& part, const char* row, int half, uint32_t numbers, Vec scale,
                      Vec products, float* sums) {
  const Vec x = set1(*reinterpret_cast<const LooseFloat*>(row + part.scale_at));
  Vec total = set1(0.f);
  if (!part.first) total = load(sums);
  total = fma(products, scale * x, total);
  if (part.offsets) {
    const Vec n = set1(static_cast<float>(static_cast<int32_t>(numbers))) * x;
    total = fma(load(part.header + (PANEL + half * LANES) * 4), n, total);
  }
  store(sums, total);
}

}  // namespace
}  // namespace penstock
