// How units of codes become steps of weights, in registers.
//
// Every kind decodes a unit of BYTES to STEPS steps, and multiplies steps with inputs of its
// arithmetic. Included by coded_linear.cpp alone.
#pragma once

#include "linear.h"

namespace penstock {
namespace {

// What sixteen codes stand for: of each word of a unit, the four bits of that number.
inline Vec sixteen(const float* table, const char* unit, int nibble) {
#if defined(__AVX512F__)
  const NativeBits codes = *reinterpret_cast<const LooseBits*>(unit) >> (4 * nibble);
  return _mm512_permutexvar_ps((__m512i)codes, _mm512_load_ps(table));
#elif defined(__AVX2__) && defined(__FMA__)
  const auto eight = [&](const char* from) {
    const __m256i codes = (__m256i)(*reinterpret_cast<const LooseBits*>(from) >> (4 * nibble));
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), codes);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), codes);
    // Bit 3 chooses, where the blend looks at the sign.
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  };
  return Vec{Native(eight(unit)), Native(eight(unit + 32))};
#else
  float lanes[LANES];
  for (int lane = 0; lane < LANES; lane++) {
    uint32_t word;
    std::memcpy(&word, unit + 4 * lane, 4);
    lanes[lane] = table[word >> (4 * nibble) & 15];
  }
  return load(lanes);
#endif
}

#if !defined(__AVX512VBMI__)
inline NativeInt widened(const char* codes) {
#if defined(__AVX512F__)
  return (NativeInt)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
#elif defined(__AVX2__) && defined(__FMA__)
  return (NativeInt)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
#else
  NativeInt wide;
  for (int i = 0; i < WIDTH; i++) wide[i] = static_cast<int8_t>(codes[i]);
  return wide;
#endif
}
// As fp8_value: the sign in its place, the rest as a float's small exponent and digits.
inline Native bytes_of(const char* codes, bool fp8, Native*) {
  const NativeInt wide = widened(codes);
  if (!fp8) return __builtin_convertvector(wide, Native);
  const NativeInt bits = (wide & INT32_MIN) | (wide & 0x7f) << 20;
  return reinterpret_cast<Native>(bits) * native_set1(0x1p120f);
}
template <class Half>
inline Pair<Half> bytes_of(const char* codes, bool fp8, Pair<Half>*) {
  return {bytes_of(codes, fp8, static_cast<Half*>(nullptr)),
          bytes_of(codes + lanes_of<Half>, fp8, static_cast<Half*>(nullptr))};
}
// What sixteen codes of eight bits stand for.
inline Vec sixteen_bytes(const char* codes, bool fp8) {
  return bytes_of(codes, fp8, static_cast<Vec*>(nullptr));
}
#endif

// A step is 32 weights of one input, which are floats, or of two, which are bf16.
#if defined(__AVX512BF16__)
struct Halves {
  using Arithmetic = Halves;
  static constexpr int64_t INPUT_BYTES = 4;
  static void multiply(const char* input, Vec lo, Vec hi, Vec& sum_lo, Vec& sum_hi) {
    const __m512bh x = (__m512bh)set1(*reinterpret_cast<const LooseFloat*>(input));
    sum_lo = _mm512_dpbf16_ps(sum_lo, x, (__m512bh)lo);
    sum_hi = _mm512_dpbf16_ps(sum_hi, x, (__m512bh)hi);
  }
};
#endif

struct Floats {
  using Arithmetic = Floats;
  static constexpr int64_t INPUT_BYTES = 4;
  static void multiply(const char* input, Vec lo, Vec hi, Vec& sum_lo, Vec& sum_hi) {
    const Vec x = set1(*reinterpret_cast<const LooseFloat*>(input));
    sum_lo = fma(x, lo, sum_lo);
    sum_hi = fma(x, hi, sum_hi);
  }
};

// What the cache holds of decoded weights.
template <class Multiplied>
struct Decoded : Multiplied {
  static constexpr int STEPS = 1, BYTES = STEP_BYTES;
  explicit Decoded(const CodeTables&) {}
  void decode(const char* w, Vec* lo, Vec* hi) const {
    lo[0] = load(w);
    hi[0] = load(w + STEP_BYTES / 2);
  }
};

struct FourBitFloats : Floats {
  static constexpr int STEPS = 4, BYTES = UNIT_BYTES;
  const float* table;
  explicit FourBitFloats(const CodeTables& tables) : table(tables.floats) {}
  void decode(const char* w, Vec* lo, Vec* hi) const {
#pragma GCC unroll 4
    for (int i = 0; i < STEPS; i++) {
      const int nibble = 4 * (i % 2) + 2 * (i / 2);
      lo[i] = sixteen(table, w, nibble);
      hi[i] = sixteen(table, w, nibble + 1);
    }
  }
};

#if defined(__AVX512BF16__)
struct FourBitHalves : Halves {
  static constexpr int STEPS = 2, BYTES = UNIT_BYTES;
  __m512i table;
  explicit FourBitHalves(const CodeTables& tables) : table(_mm512_load_si512(tables.halves)) {}
  // The lookup takes five bits, and the table repeats itself for the fifth.
  void decode(const char* w, Vec* lo, Vec* hi) const {
    const __m512i codes = _mm512_loadu_si512(w);
    lo[0] = (Vec)_mm512_permutexvar_epi16(codes, table);
    hi[0] = (Vec)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    lo[1] = (Vec)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
    hi[1] = (Vec)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
  }
};
#endif

#if defined(__AVX512VBMI__)
struct ByteTables {
  const CodeTables& tables;
  explicit ByteTables(const CodeTables& t) : tables(t) {}
  // bf16 of two inputs and 32 outputs: the bytes of each by its magnitude, then the sign.
  void pairs(const char* w, __m512i& lo, __m512i& hi) const {
    const __m512i codes = _mm512_loadu_si512(w);
    const auto table = [&](const uint8_t* t) { return _mm512_load_si512(t); };
    const __m512i low = _mm512_permutex2var_epi8(table(tables.low), codes, table(tables.low + 64));
    __m512i high = _mm512_permutex2var_epi8(table(tables.high), codes, table(tables.high + 64));
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    high = _mm512_ternarylogic_epi64(high, codes, sign, 0xf8);  // high | (codes & sign)
    high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(codes, sign),
                                _mm512_set1_epi8(static_cast<char>(tables.minus_zero)));
    lo = _mm512_unpacklo_epi8(low, high);
    hi = _mm512_unpackhi_epi8(low, high);
  }
};
struct ByteFloats : Floats, ByteTables {
  static constexpr int STEPS = 2, BYTES = UNIT_BYTES;
  using ByteTables::ByteTables;
  void decode(const char* w, Vec* lo, Vec* hi) const {
    __m512i first, second;
    pairs(w, first, second);
    const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    lo[0] = (Vec)_mm512_slli_epi32(first, 16);
    hi[0] = (Vec)_mm512_slli_epi32(second, 16);
    lo[1] = (Vec)_mm512_and_si512(first, odd);
    hi[1] = (Vec)_mm512_and_si512(second, odd);
  }
};
#else
struct ByteFloats : Floats {
  static constexpr int STEPS = 2, BYTES = UNIT_BYTES;
  bool fp8;
  explicit ByteFloats(const CodeTables& tables) : fp8(tables.fp8) {}
  void decode(const char* w, Vec* lo, Vec* hi) const {
    for (int i = 0; i < STEPS; i++) {
      lo[i] = sixteen_bytes(w + 32 * i, fp8);
      hi[i] = sixteen_bytes(w + 32 * i + 16, fp8);
    }
  }
};
#endif

#if defined(__AVX512BF16__)
#if defined(__AVX512VBMI__)
struct ByteHalves : Halves, ByteTables {
  static constexpr int STEPS = 1, BYTES = UNIT_BYTES;
  using ByteTables::ByteTables;
  void decode(const char* w, Vec* lo, Vec* hi) const {
    __m512i first, second;
    pairs(w, first, second);
    lo[0] = (Vec)first;
    hi[0] = (Vec)second;
  }
};
#else
struct ByteHalves : Halves {
  static constexpr int STEPS = 1, BYTES = UNIT_BYTES;
  bool fp8;
  explicit ByteHalves(const CodeTables& tables) : fp8(tables.fp8) {}
  void decode(const char* w, Vec* lo, Vec* hi) const {
    const auto both = [&](const char* from) {
      return (Vec)_mm512_or_si512(_mm512_srli_epi32((__m512i)sixteen_bytes(from, fp8), 16),
                                  (__m512i)sixteen_bytes(from + 32, fp8));
    };
    lo[0] = both(w);
    hi[0] = both(w + 16);
  }
};
#endif
#endif

}  // namespace
}  // namespace penstock
