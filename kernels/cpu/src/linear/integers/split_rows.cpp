#include "split_rows.h"

#include <algorithm>
#include <limits>

namespace penstock {
namespace {

constexpr float LARGEST = 16383.f, LEAST = 1e-30f;

// The largest magnitude of some floats, or their first bits above it if one is not finite: the bits of
// magnitudes are in the order of their values.
float largest_magnitude(const float* x, int64_t count) {
#if defined(__AVX512F__)
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += LANES) {
    const Vec v = load_first(x + i, static_cast<int>(std::min<int64_t>(LANES, count - i)));
    most = _mm512_max_epu32(most, _mm512_and_si512((__m512i)v, _mm512_set1_epi32(0x7fffffff)));
  }
  const uint32_t bits = _mm512_reduce_max_epu32(most);
#else
  uint32_t bits = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint32_t own = reinterpret_cast<const LooseWord*>(x)[i] & 0x7fffffffu;
    bits = own > bits ? own : bits;
  }
#endif
  float most_value;
  std::memcpy(&most_value, &bits, 4);
  return most_value;
}

// 1 / scale, and the scale; zeros where all inputs are as good as zeros.
float reciprocal_scale(const float* x, int64_t count, float& scale) {
  const float top = largest_magnitude(x, count);
  scale = top < LEAST ? 0.f : top / LARGEST;
  if (!(top <= std::numeric_limits<float>::max()))
    scale = std::numeric_limits<float>::quiet_NaN();
  return scale > 0.f ? LARGEST / top : 0.f;
}

}  // namespace

void SplitRow::fill(const float* x, char* row) const {
  auto* const scales = reinterpret_cast<float*>(row + scales_at());
  auto* sums = reinterpret_cast<uint32_t*>(row + sums_at());
  uint32_t total = 0;
  *sums++ = 0;
  for (int64_t begin = 0; begin < columns; begin += SPLIT_PIECE) {
    const int64_t end = std::min(columns, begin + SPLIT_PIECE);
    const float factor = reciprocal_scale(x + begin, end - begin, scales[begin / SPLIT_PIECE]);
    for (int64_t i = begin; i < end; i += SPLIT_SUM) {
#if defined(PENSTOCK_BYTE_DOT)
      __m512i sixteen = _mm512_setzero_si512();
#elif defined(PENSTOCK_WORD_DOT)
      __m256i eight = _mm256_setzero_si256();
#endif
      for (int64_t k = i; k < std::min(end, i + SPLIT_SUM); k += LANES) {
        const int here = static_cast<int>(std::min<int64_t>(LANES, end - k));
        const Vec scaled = load_first(x + k, here) * set1(factor);
#if defined(PENSTOCK_BYTE_DOT)
        const __m512i q = _mm512_cvtps_epi32(scaled);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row + k),
                         _mm512_cvtepi32_epi8(_mm512_srai_epi32(q, 7)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row + low_at() + k),
                         _mm512_cvtepi32_epi8(_mm512_and_si512(q, _mm512_set1_epi32(127))));
        sixteen = _mm512_add_epi32(sixteen, q);
#else
        float lanes[LANES];
        store(lanes, scaled);
#if defined(PENSTOCK_WORD_DOT)
        const __m256i lo = _mm256_cvtps_epi32(_mm256_loadu_ps(lanes));
        const __m256i hi = _mm256_cvtps_epi32(_mm256_loadu_ps(lanes + 8));
        // Packing works in halves of registers, whose order the permutation restores.
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 2 * k), words);
        eight = _mm256_add_epi32(eight, _mm256_add_epi32(lo, hi));
#else
        for (int l = 0; l < LANES; l++) {
          const auto q = static_cast<int32_t>(std::nearbyint(lanes[l]));
          row[k + l] = static_cast<char>(q >> 7);
          row[low_at() + k + l] = static_cast<char>(q & 127);
          total += static_cast<uint32_t>(q);
        }
#endif
#endif
      }
#if defined(PENSTOCK_BYTE_DOT)
      total += static_cast<uint32_t>(_mm512_reduce_add_epi32(sixteen));
#elif defined(PENSTOCK_WORD_DOT)
      uint32_t parts[8];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), eight);
      for (const uint32_t part : parts) total += part;
#endif
      *sums++ = total;
    }
  }
}

}  // namespace penstock
