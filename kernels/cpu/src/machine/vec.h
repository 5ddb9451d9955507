// Sixteen floats as one value, whatever registers the instruction set has.
//
// Vec is one register with AVX-512, two with AVX2, four elsewhere (SSE2, NEON). Every operation
// works lane by lane in the same order on all of them, so AVX2 and AVX-512 give the same bits.
// Compiled with -ffp-contract=off: a product is fused with a sum only where fma() says so.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace penstock {

using bf16 = uint16_t;  // the upper half of a float's bits

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

#if defined(__AVX512BF16__)
constexpr bool HAS_BF16_DOT = true;
#else
constexpr bool HAS_BF16_DOT = false;
#endif

typedef float Native __attribute__((vector_size(WIDTH * 4)));
typedef int32_t NativeInt __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t NativeBits __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t NativeHalves __attribute__((vector_size(WIDTH * 2)));

// The same, for memory of any alignment and any declared type.
typedef float LooseNative __attribute__((vector_size(WIDTH * 4), aligned(1), may_alias));
typedef uint32_t LooseBits __attribute__((vector_size(WIDTH * 4), aligned(1), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(WIDTH * 2), aligned(1), may_alias));
typedef float LooseFloat __attribute__((aligned(1), may_alias));
typedef uint32_t LooseWord __attribute__((aligned(1), may_alias));

template <class Half>
struct Pair {
  Half lo, hi;
};

template <int N>
struct VecOf {
  using type = Pair<typename VecOf<N / 2>::type>;
};
template <>
struct VecOf<WIDTH> {
  using type = Native;
};
using Vec = VecOf<LANES>::type;

// Sixteen words of 32 bits, in as many registers.
template <int N>
struct WordsOf {
  using type = Pair<typename WordsOf<N / 2>::type>;
};
template <>
struct WordsOf<WIDTH> {
  using type = NativeBits;
};
using Words = WordsOf<LANES>::type;

template <class T>
constexpr int lanes_of = static_cast<int>(sizeof(T) / sizeof(float));

// ---- one register

inline Native native_set1(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return Native{x, x, x, x};
#endif
}
template <class T>
struct Make;
template <>
struct Make<Native> {
  static Native set1(float x) { return native_set1(x); }
  static Native load(const void* p) { return *static_cast<const LooseNative*>(p); }
  static Native load_bf16(const bf16* p) {
    // By name: GCC 12 widens a vector's halves one by one, and puts them together again.
#if defined(__AVX512F__)
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
#elif defined(__AVX2__)
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
#else
    const NativeHalves halves = *reinterpret_cast<const LooseHalves*>(p);
    return reinterpret_cast<Native>(__builtin_convertvector(halves, NativeBits) << 16);
#endif
  }
  static Native load_int8(const int8_t* p) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    return Native{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
                  static_cast<float>(p[3])};
#endif
  }
  // The floats at even or odd places of 2 * WIDTH packed bf16 values.
  static Native load_even(const void* p) {
    return reinterpret_cast<Native>(*static_cast<const LooseBits*>(p) << 16);
  }
  static Native load_odd(const void* p) {
    return reinterpret_cast<Native>(*static_cast<const LooseBits*>(p) & 0xffff0000u);
  }
};
template <class Half>
struct Make<Pair<Half>> {
  static constexpr int HALF = lanes_of<Half>;
  static Pair<Half> set1(float x) { return {Make<Half>::set1(x), Make<Half>::set1(x)}; }
  static Pair<Half> load(const void* p) {
    return {Make<Half>::load(p), Make<Half>::load(static_cast<const float*>(p) + HALF)};
  }
  static Pair<Half> load_bf16(const bf16* p) {
    return {Make<Half>::load_bf16(p), Make<Half>::load_bf16(p + HALF)};
  }
  static Pair<Half> load_int8(const int8_t* p) {
    return {Make<Half>::load_int8(p), Make<Half>::load_int8(p + HALF)};
  }
  static Pair<Half> load_even(const void* p) {
    return {Make<Half>::load_even(p), Make<Half>::load_even(static_cast<const uint32_t*>(p) + HALF)};
  }
  static Pair<Half> load_odd(const void* p) {
    return {Make<Half>::load_odd(p), Make<Half>::load_odd(static_cast<const uint32_t*>(p) + HALF)};
  }
};

inline void store(void* p, Native v) { *static_cast<LooseNative*>(p) = v; }
// As whole numbers, towards zero.
inline void store_ints(int32_t* p, Native v) {
  const NativeInt whole = __builtin_convertvector(v, NativeInt);
  std::memcpy(p, &whole, sizeof whole);
}
inline Native fma(Native a, Native b, Native c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
// c = fma(a, b, c) in c's own register. In long loops compilers put the result in a's or b's place,
// and spill registers for that.
inline void add_product(Native a, Native b, Native& c) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
#else
  c = fma(a, b, c);
#endif
}
inline Native max(Native a, Native b) { return a > b ? a : b; }
inline Native min(Native a, Native b) { return a < b ? a : b; }
inline Native where_less(Native a, Native b, Native x, Native y) { return a < b ? x : y; }
// 2 ** n for whole numbers n in -126 .. 127.
inline Native power_of_two(Native n) {
  return reinterpret_cast<Native>((__builtin_convertvector(n, NativeInt) + 127) << 23);
}
// A positive normal number is fraction(x) * 2 ** exponent(x), the fraction in 1 .. 2.
inline Native exponent(Native x) {
  const NativeInt biased = reinterpret_cast<NativeInt>(reinterpret_cast<NativeBits>(x) >> 23);
  return __builtin_convertvector(biased - 127, Native);
}
inline Native fraction(Native x) {
  return reinterpret_cast<Native>((reinterpret_cast<NativeBits>(x) & 0x7fffffu) | 0x3f800000u);
}
inline bool all_less(Native a, Native b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) == 0xffff;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) == 0xff;
#else
  bool all = true;
  for (int i = 0; i < WIDTH; i++) all &= a[i] < b[i];
  return all;
#endif
}
inline NativeBits times(NativeBits a, uint32_t b) { return a * b; }
inline NativeBits plus(NativeBits a, uint32_t b) { return a + b; }
inline NativeBits masked(NativeBits a, uint32_t b) { return a & b; }
inline NativeBits xor_shifted(NativeBits a, int bits) { return a ^ (a >> bits); }
// Of words below 2 ** 31.
inline Native to_floats(NativeBits a) {
  return __builtin_convertvector(reinterpret_cast<NativeInt>(a), Native);
}
// Rounded to the nearest, ties to even; what is not a number stays none.
inline void store_bf16(bf16* p, Native v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
#else
  const NativeBits bits = reinterpret_cast<NativeBits>(v);
  NativeBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const NativeBits none = NativeBits{} + 0x7fc0u;
  rounded = v == v ? rounded : none;
  *reinterpret_cast<LooseHalves*>(p) = __builtin_convertvector(rounded, NativeHalves);
#endif
}

// ---- several registers

template <class H>
inline Pair<H> operator+(Pair<H> a, Pair<H> b) { return {a.lo + b.lo, a.hi + b.hi}; }
template <class H>
inline Pair<H> operator-(Pair<H> a, Pair<H> b) { return {a.lo - b.lo, a.hi - b.hi}; }
template <class H>
inline Pair<H> operator*(Pair<H> a, Pair<H> b) { return {a.lo * b.lo, a.hi * b.hi}; }
template <class H>
inline Pair<H> operator/(Pair<H> a, Pair<H> b) { return {a.lo / b.lo, a.hi / b.hi}; }
template <class H>
inline Pair<H> operator-(Pair<H> a) { return {-a.lo, -a.hi}; }
template <class H>
inline Pair<H> fma(Pair<H> a, Pair<H> b, Pair<H> c) {
  return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}
template <class H>
inline void add_product(Pair<H> a, Pair<H> b, Pair<H>& c) {
  add_product(a.lo, b.lo, c.lo);
  add_product(a.hi, b.hi, c.hi);
}
template <class H>
inline Pair<H> max(Pair<H> a, Pair<H> b) { return {max(a.lo, b.lo), max(a.hi, b.hi)}; }
template <class H>
inline Pair<H> min(Pair<H> a, Pair<H> b) { return {min(a.lo, b.lo), min(a.hi, b.hi)}; }
template <class H>
inline Pair<H> where_less(Pair<H> a, Pair<H> b, Pair<H> x, Pair<H> y) {
  return {where_less(a.lo, b.lo, x.lo, y.lo), where_less(a.hi, b.hi, x.hi, y.hi)};
}
template <class H>
inline Pair<H> power_of_two(Pair<H> n) { return {power_of_two(n.lo), power_of_two(n.hi)}; }
template <class H>
inline Pair<H> exponent(Pair<H> x) { return {exponent(x.lo), exponent(x.hi)}; }
template <class H>
inline Pair<H> fraction(Pair<H> x) { return {fraction(x.lo), fraction(x.hi)}; }
template <class H>
inline bool all_less(Pair<H> a, Pair<H> b) { return all_less(a.lo, b.lo) && all_less(a.hi, b.hi); }
template <class H>
inline Pair<H> times(Pair<H> a, uint32_t b) { return {times(a.lo, b), times(a.hi, b)}; }
template <class H>
inline Pair<H> plus(Pair<H> a, uint32_t b) { return {plus(a.lo, b), plus(a.hi, b)}; }
template <class H>
inline Pair<H> masked(Pair<H> a, uint32_t b) { return {masked(a.lo, b), masked(a.hi, b)}; }
template <class H>
inline Pair<H> xor_shifted(Pair<H> a, int bits) {
  return {xor_shifted(a.lo, bits), xor_shifted(a.hi, bits)};
}
template <class H>
inline auto to_floats(Pair<H> a) -> Pair<decltype(to_floats(a.lo))> {
  return {to_floats(a.lo), to_floats(a.hi)};
}
template <class H>
inline void store(void* p, Pair<H> v) {
  store(p, v.lo);
  store(static_cast<float*>(p) + lanes_of<H>, v.hi);
}
template <class H>
inline void store_ints(int32_t* p, Pair<H> v) {
  store_ints(p, v.lo);
  store_ints(p + lanes_of<H>, v.hi);
}
template <class H>
inline void store_bf16(bf16* p, Pair<H> v) {
  store_bf16(p, v.lo);
  store_bf16(p + lanes_of<H>, v.hi);
}

// ---- sixteen lanes

inline Vec set1(float x) { return Make<Vec>::set1(x); }
inline Vec load(const void* p) { return Make<Vec>::load(p); }
inline Vec load_bf16(const bf16* p) { return Make<Vec>::load_bf16(p); }
inline Vec load_int8(const int8_t* p) { return Make<Vec>::load_int8(p); }
inline Vec load_even(const void* p) { return Make<Vec>::load_even(p); }
inline Vec load_odd(const void* p) { return Make<Vec>::load_odd(p); }
inline Vec iota() {
  static const float numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(numbers);
}
// The words begin .. begin + 15.
inline Words count_from(uint32_t begin) {
  static const uint32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Words words;
  std::memcpy(&words, numbers, sizeof words);
  return plus(words, begin);
}
// Lanes first .. last - 1 of x, and `other` in those around them.
inline Vec keep(Vec x, int first, int last, Vec other) {
  const Vec lane = iota();
  x = where_less(lane, set1(static_cast<float>(first)), other, x);
  return where_less(lane, set1(static_cast<float>(last)), x, other);
}
// The first n of 16 floats; zeros in the lanes after them, whose memory is not read.
inline Vec load_first(const float* p, int n) {
  if (n >= LANES) return load(p);
  float lanes[LANES] = {};
  std::memcpy(lanes, p, sizeof(float) * static_cast<size_t>(n));
  return load(lanes);
}
inline void store_first(float* p, Vec v, int n) {
  if (n >= LANES) return store(p, v);
  float lanes[LANES];
  store(lanes, v);
  std::memcpy(p, lanes, sizeof(float) * static_cast<size_t>(n));
}
inline void store_first_bf16(bf16* p, Vec v, int n) {
  if (n >= LANES) return store_bf16(p, v);
  bf16 lanes[LANES];
  store_bf16(lanes, v);
  std::memcpy(p, lanes, sizeof(bf16) * static_cast<size_t>(n));
}
// Pairwise, in the same order on every instruction set.
inline float sum(Vec v) {
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}
inline float largest(Vec v) {
  float lanes[LANES];
  store(lanes, v);
  float most = lanes[0];
  for (float x : lanes) most = x > most ? x : most;
  return most;
}

inline float to_float(bf16 bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}
inline bf16 to_bf16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<bf16>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline void prefetch(const char* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace penstock
