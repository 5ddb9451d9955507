#include "integer_linear.h"

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

using Tile = void (*)(Parts, const char*, int64_t, int64_t, bool, float*, Ahead);

template <class Weights, bool CARRIES>
Tile tile_of(int64_t rows) {
  constexpr int most = INTEGER_TILE_ROWS<CARRIES>;
  static_assert(most <= 12, "a case for each number of rows");
  switch (rows) {
#define PENSTOCK_ROWS(n) \
  case n:                \
    return tile<Weights, n <= most ? n : 1, CARRIES>;
    PENSTOCK_ROWS(1) PENSTOCK_ROWS(2) PENSTOCK_ROWS(3) PENSTOCK_ROWS(4) PENSTOCK_ROWS(5)
    PENSTOCK_ROWS(6) PENSTOCK_ROWS(7) PENSTOCK_ROWS(8) PENSTOCK_ROWS(9) PENSTOCK_ROWS(10)
    PENSTOCK_ROWS(11)
#undef PENSTOCK_ROWS
    default: return tile<Weights, most, CARRIES>;
  }
}

template <class Weights, bool CARRIES>
void sum(const Matrix& matrix, const RowBlock& block, int64_t panel, float* sums) {
  const int64_t tiles = divided_up(block.rows, INTEGER_TILE_ROWS<CARRIES>);
  const Parts parts(matrix, matrix.panel(panel), Weights::BYTES);
  const char* next = matrix.panel(panel + 1);
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t row = block.rows * t / tiles, rows = block.rows * (t + 1) / tiles - row;
    const int64_t steps = matrix.units * passes<CARRIES>(rows);
    const int64_t share = divided_up(matrix.panel_bytes, steps * tiles);
    // Units of eight bits fetch two lines: a share may be more than one, and none is to be left out.
    const Ahead ahead{block.rows <= FEW<CARRIES> ? AHEAD_FEW_ROWS : 0, {next, 64, share}};
    tile_of<Weights, CARRIES>(rows)(parts, block.input + row * block.input_stride,
                                    block.input_stride, SplitRow{matrix.inputs}.low_at(),
                                    matrix.coding.offsets, sums + row * PANEL, ahead);
    next += steps * share;
  }
}

template <class Weights>
void sum(const Matrix& matrix, const RowBlock& block, int64_t panel, float* sums) {
  const int64_t group = 4 * matrix.group_units;
  const bool has_whole_pieces = group >= matrix.inputs || group % SPLIT_PIECE == 0;
  (CAN_CARRY && !has_whole_pieces ? sum<Weights, CAN_CARRY> : sum<Weights, false>)(
      matrix, block, panel, sums);
}

}  // namespace

void sum_integers(const Matrix& matrix, const RowBlock& block, int64_t panel, float* sums) {
  (matrix.coding.codes == Codes::INT8 ? sum<EightBits> : sum<FourBits>)(matrix, block, panel, sums);
}

#else

void sum_integers(const Matrix&, const RowBlock&, int64_t, float*) {}

#endif

}  // namespace penstock
