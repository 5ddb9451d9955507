#include "integer_linear.h"

#include <algorithm>

#include "split_rows.h"
#include "tiles.h"

namespace penstock {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

namespace {

// ---- 32 outputs of four inputs, as bytes without a sign

struct FourBits {
  static constexpr int64_t BYTES = 64;
  static void load(const char* w, __m512i& lo, __m512i& hi) {
    const __m512i both = _mm512_loadu_si512(w), low = _mm512_set1_epi8(15);
    lo = _mm512_and_si512(both, low);
    hi = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
  }
};

struct EightBits {
  static constexpr int64_t BYTES = 128;
  static void load(const char* w, __m512i& lo, __m512i& hi) {
    lo = _mm512_loadu_si512(w);
    hi = _mm512_loadu_si512(w + 64);
  }
};

// ---- tiles

// A part of the inputs with one scale of activations and one of each output.
struct Part {
  const char* weights;
  int64_t steps;       // of four inputs
  const char* header;  // scales, then offsets if there are any
  bool offsets;
  int32_t middle;      // what weights have more than their values
  const char* input;   // high bytes of the first row
  int64_t low_at, scale_at, sum_at, last_sum_at;  // bytes from there
  bool first;
};

inline __m512i four_inputs(const char* row) {
  return _mm512_set1_epi32(static_cast<int32_t>(*reinterpret_cast<const LooseWord*>(row)));
}

// Few rows: both bytes of an activation in one pass, in registers of their own.
constexpr int FEW = 5;

// sums [ROWS][EACH] += weights times the bytes at `input`, and, if EACH is 4, the last two times those
// `low_at` bytes behind them.
template <class Weights, int ROWS, int EACH>
inline void add_products(const char* w, int64_t steps, const char* input, int64_t stride,
                         int64_t low_at, const char* ahead, __m512i (&sum)[ROWS][EACH]) {
  // A pointer to every third row: the two after it are reached by scaled addressing.
  const char *a = input, *b = a + 3 * stride, *c = a + 6 * stride, *d = a + 9 * stride;
  for (int64_t s = 0; s < steps; s++, w += Weights::BYTES, ahead += Weights::BYTES) {
    __m512i w_lo, w_hi;
    Weights::load(w, w_lo, w_hi);
    prefetch(ahead);
    if (Weights::BYTES > 64) prefetch(ahead + 64);
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

// 128 times the high bytes' products; what the middle of the weights adds to all is taken off.
inline __m512i shifted(__m512i sum, int32_t rest) {
  return _mm512_sub_epi32(_mm512_slli_epi32(sum, 7), _mm512_set1_epi32(rest));
}

template <class Weights, int ROWS>
void tile(const Part& part, int64_t stride, float* sums, const char* ahead) {
  constexpr int EACH = ROWS <= FEW ? 4 : 2;
  __m512i sum[ROWS][EACH];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int i = 0; i < EACH; i++) sum[r][i] = _mm512_setzero_si512();
  add_products<Weights, ROWS, EACH>(part.weights, part.steps, part.input, stride, part.low_at,
                                    ahead, sum);
  uint32_t numbers[ROWS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) {
    const char* row = part.input + r * stride;
    numbers[r] = *reinterpret_cast<const LooseWord*>(row + part.last_sum_at) -
                 *reinterpret_cast<const LooseWord*>(row + part.sum_at);
    const auto rest = static_cast<int32_t>(static_cast<uint32_t>(part.middle) * numbers[r]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      sum[r][i] = shifted(sum[r][i], rest);
      if (EACH == 4) sum[r][i] = _mm512_add_epi32(sum[r][i], sum[r][EACH - 2 + i]);
    }
  }
  if (EACH == 2)
    add_products<Weights, ROWS, EACH>(part.weights, part.steps, part.input + part.low_at, stride,
                                      0, part.weights, sum);
  const Vec scale_lo = load(part.header), scale_hi = load(part.header + LANES * 4);
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++, sums += PANEL) {
    const char* row = part.input + r * stride;
    const Vec x = set1(*reinterpret_cast<const LooseFloat*>(row + part.scale_at));
    Vec total_lo = set1(0.f), total_hi = set1(0.f);
    if (!part.first) total_lo = load(sums), total_hi = load(sums + LANES);
    total_lo = fma(_mm512_cvtepi32_ps(sum[r][0]), scale_lo * x, total_lo);
    total_hi = fma(_mm512_cvtepi32_ps(sum[r][1]), scale_hi * x, total_hi);
    if (part.offsets) {
      const Vec n = set1(static_cast<float>(static_cast<int32_t>(numbers[r]))) * x;
      total_lo = fma(load(part.header + PANEL * 4), n, total_lo);
      total_hi = fma(load(part.header + (PANEL + LANES) * 4), n, total_hi);
    }
    store(sums, total_lo);
    store(sums + LANES, total_hi);
  }
}

using Tile = void (*)(const Part&, int64_t, float*, const char*);

template <class Weights>
Tile tile_of(int64_t rows) {
  static_assert(MOST_ROWS == 12, "a case for each number of rows");
  switch (rows) {
#define PENSTOCK_ROWS(n) \
  case n:                \
    return tile<Weights, n>;
    PENSTOCK_ROWS(1) PENSTOCK_ROWS(2) PENSTOCK_ROWS(3) PENSTOCK_ROWS(4) PENSTOCK_ROWS(5)
    PENSTOCK_ROWS(6) PENSTOCK_ROWS(7) PENSTOCK_ROWS(8) PENSTOCK_ROWS(9) PENSTOCK_ROWS(10)
    PENSTOCK_ROWS(11)
#undef PENSTOCK_ROWS
    default: return tile<Weights, 12>;
  }
}

template <class Weights>
void sum(const Matrix& matrix, const RowBlock& block, int64_t panel, float* sums) {
  const SplitRow split{matrix.inputs};
  const int64_t tiles = (block.rows + MOST_ROWS - 1) / MOST_ROWS;
  const int64_t ahead = block.rows <= FEW ? AHEAD_FEW_ROWS : AHEAD / 2;
  const char* group = matrix.panel(panel);
  Part part{};
  part.first = true;
  part.offsets = matrix.coding.offsets;
  part.middle = matrix.coding.codes == Codes::INT8 ? 128 : 8;
  for (int64_t g = 0; g < matrix.groups; g++) {
    const int64_t end = std::min(matrix.inputs, (g + 1) * matrix.group_units * 4);
    part.header = group;
    part.weights = group + matrix.header_bytes;
    // Units are fetched ahead by tiles; what lies between two groups is not among them.
    for (int64_t i = 0; i < matrix.header_bytes; i += 64) prefetch(group + ahead + i);
    for (int64_t k = g * matrix.group_units * 4; k < end;) {
      // Up to the end of the group, or of the activations' piece.
      const int64_t stop = std::min(end, k / SPLIT_PIECE * SPLIT_PIECE + SPLIT_PIECE);
      part.steps = (stop - k + 3) / 4;
      part.low_at = split.low_at();
      part.scale_at = split.scales_at() + 4 * (k / SPLIT_PIECE) - k;
      part.sum_at = split.sums_at() + 4 * (k / SPLIT_SUM) - k;
      part.last_sum_at = split.sums_at() + 4 * ((stop + SPLIT_SUM - 1) / SPLIT_SUM) - k;
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t row = block.rows * t / tiles, rows = block.rows * (t + 1) / tiles - row;
        part.input = block.input + row * block.input_stride + k;
        tile_of<Weights>(rows)(part, block.input_stride, sums + row * PANEL,
                               part.weights + (t ? 0 : ahead));
      }
      part.weights += part.steps * Weights::BYTES;
      part.first = false;
      k = stop;
    }
    group += matrix.header_bytes + matrix.group_units * Weights::BYTES;
  }
}

}  // namespace

void sum_integers(const Matrix& matrix, const RowBlock& block, int64_t panel, float* sums) {
  (matrix.coding.codes == Codes::INT8 ? sum<EightBits> : sum<FourBits>)(matrix, block, panel, sums);
}

#else

void sum_integers(const Matrix&, const RowBlock&, int64_t, float*) {}

#endif

}  // namespace penstock
