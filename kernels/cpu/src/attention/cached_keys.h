// How sixteen cached keys meet a query, and sixteen dims of a cached value a weight.
#pragma once

#include "../machine/vec.h"

namespace penstock {

struct FloatKeys {
  static constexpr int QUERY_BYTES = 4, KEY_BYTES = 64;
  static constexpr bool SCALED = false;
  Vec keys;
  explicit FloatKeys(const char* p) : keys(load(p)) {}
  void multiply(const char* query, Vec& sum) const {
    sum = fma(set1(*reinterpret_cast<const LooseFloat*>(query)), keys, sum);
  }
  static Vec values(const char* p) { return load(p); }
  static constexpr int VALUE_BYTES = 4;
};

#if defined(__AVX512BF16__)
struct HalfKeys {
  static constexpr int QUERY_BYTES = 4, KEY_BYTES = 64;
  static constexpr bool SCALED = false;
  Vec keys;
  explicit HalfKeys(const char* p) : keys(load(p)) {}
  void multiply(const char* query, Vec& sum) const {
    const __m512bh x = (__m512bh)set1(*reinterpret_cast<const LooseFloat*>(query));
    sum = _mm512_dpbf16_ps(sum, x, (__m512bh)keys);
  }
#else
struct HalfKeys {
  static constexpr int QUERY_BYTES = 8, KEY_BYTES = 64;
  static constexpr bool SCALED = false;
  Vec even, odd;
  explicit HalfKeys(const char* p) : even(load_even(p)), odd(load_odd(p)) {}
  void multiply(const char* query, Vec& sum) const {
    const auto* pair = reinterpret_cast<const LooseFloat*>(query);
    sum = fma(set1(pair[1]), odd, fma(set1(pair[0]), even, sum));
  }
#endif
  static Vec values(const char* p) { return load_bf16(reinterpret_cast<const bf16*>(p)); }
  static constexpr int VALUE_BYTES = 2;
};

// Sums are of whole numbers; scores and weights take the scales, each once for its sixteen.
struct ByteKeys {
  static constexpr int QUERY_BYTES = 4, KEY_BYTES = 16;
  static constexpr bool SCALED = true;
  Vec keys;
  explicit ByteKeys(const char* p) : keys(values(p)) {}
  void multiply(const char* query, Vec& sum) const {
    sum = fma(set1(*reinterpret_cast<const LooseFloat*>(query)), keys, sum);
  }
  static Vec values(const char* p) { return load_int8(reinterpret_cast<const int8_t*>(p)); }
  static constexpr int VALUE_BYTES = 1;
};
inline Vec scales(const char* p) { return load_bf16(reinterpret_cast<const bf16*>(p)); }

}  // namespace penstock
