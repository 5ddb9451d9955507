#include "split_rows.h"

#include <algorithm>
#include <limits>

namespace penstock {
namespace {

constexpr float LARGEST = 16383.f, LEAST = 1e-30f;

// 1 / scale, and the scale; zeros where all inputs are as good as zeros.
float reciprocal_scale(const float* x, int64_t count, float& scale) {
  Vec most = set1(0.f), none = set1(0.f);
  for (int64_t i = 0; i < count; i += LANES) {
    const Vec v = load_first(x + i, static_cast<int>(std::min<int64_t>(LANES, count - i)));
    most = max(most, max(v, -v));
    none = none + v * set1(0.f);
  }
  const float top = largest(most);
  scale = top < LEAST ? 0.f : top / LARGEST;
  if (sum(none) != 0.f) scale = std::numeric_limits<float>::quiet_NaN();
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
      for (int64_t k = i; k < std::min(end, i + SPLIT_SUM); k += LANES) {
        float lanes[LANES];
        store(lanes, load_first(x + k, static_cast<int>(std::min<int64_t>(LANES, end - k))) *
                         set1(factor));
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        const __m512i q = _mm512_cvtps_epi32(load(lanes));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row + k),
                         _mm512_cvtepi32_epi8(_mm512_srai_epi32(q, 7)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row + low_at() + k),
                         _mm512_cvtepi32_epi8(_mm512_and_si512(q, _mm512_set1_epi32(127))));
        total += static_cast<uint32_t>(_mm512_reduce_add_epi32(q));
#else
        for (int l = 0; l < LANES; l++) {
          const auto q = static_cast<int32_t>(std::nearbyint(lanes[l]));
          row[k + l] = static_cast<char>(q >> 7);
          row[low_at() + k + l] = static_cast<char>(q & 127);
          total += static_cast<uint32_t>(q);
        }
#endif
      }
      *sums++ = total;
    }
  }
}

}  // namespace penstock
