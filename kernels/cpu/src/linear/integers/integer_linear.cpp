#include "integer_linear.h"

#include <algorithm>

#include "split_rows.h"
#include "../tiles.h"

#if defined(PENSTOCK_BYTE_DOT)
#include "byte_dot.h"
#elif defined(PENSTOCK_WORD_DOT)
#include "word_dot.h"
#endif

namespace penstock {

#if defined(PENSTOCK_BYTE_DOT) || defined(PENSTOCK_WORD_DOT)

namespace {

using Tile = void (*)(const Part&, int64_t, float*, const char*);

template <class Weights>
Tile tile_of(int64_t rows) {
  static_assert(INTEGER_TILE_ROWS <= 12, "a case for each number of rows");
  switch (rows) {
#define PENSTOCK_ROWS(n) \
  case n:                \
    return tile<Weights, n <= INTEGER_TILE_ROWS ? n : 1>;
    PENSTOCK_ROWS(1) PENSTOCK_ROWS(2) PENSTOCK_ROWS(3) PENSTOCK_ROWS(4) PENSTOCK_ROWS(5)
    PENSTOCK_ROWS(6) PENSTOCK_ROWS(7) PENSTOCK_ROWS(8) PENSTOCK_ROWS(9) PENSTOCK_ROWS(10)
    PENSTOCK_ROWS(11)
#undef PENSTOCK_ROWS
    default: return tile<Weights, INTEGER_TILE_ROWS>;
  }
}

template <class Weights>
void sum(const Matrix& matrix, const RowBlock& block, int64_t panel, float* sums) {
  const SplitRow split{matrix.inputs};
  const int64_t tiles = (block.rows + INTEGER_TILE_ROWS - 1) / INTEGER_TILE_ROWS;
  const int64_t ahead = block.rows <= FEW ? AHEAD_FEW_ROWS : AHEAD / 2;
  const char* group = matrix.panel(panel);
  Part part{};
  part.first = true;
  part.offsets = matrix.coding.offsets;
  part.middle = matrix.coding.codes == Codes::INT4 ? 8 : HAS_BYTE_DOT ? 128 : 0;
  for (int64_t g = 0; g < matrix.groups; g++) {
    const int64_t end = std::min(matrix.inputs, (g + 1) * matrix.group_units * 4);
    part.header = group;
    part.weights = group + matrix.header_bytes;
    // Units are fetched ahead by tiles; what lies between two groups is not among them.
    for (int64_t i = 0; i < matrix.header_bytes; i += 64) prefetch(group + ahead + i);
    for (int64_t k = g * matrix.group_units * 4; k < end;) {
      // Up to the end of the group, or of the activations' piece.
      const int64_t stop = std::min(end, k / SPLIT_PIECE * SPLIT_PIECE + SPLIT_PIECE);
      const int64_t at = k * SPLIT_NUMBER_BYTES;
      part.steps = (stop - k + 3) / 4;
      part.low_at = split.low_at();
      part.scale_at = split.scales_at() + 4 * (k / SPLIT_PIECE) - at;
      part.sum_at = split.sums_at() + 4 * (k / SPLIT_SUM) - at;
      part.last_sum_at = split.sums_at() + 4 * ((stop + SPLIT_SUM - 1) / SPLIT_SUM) - at;
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t row = block.rows * t / tiles, rows = block.rows * (t + 1) / tiles - row;
        part.input = block.input + row * block.input_stride + at;
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
