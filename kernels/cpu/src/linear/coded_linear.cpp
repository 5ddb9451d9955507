#include "coded_linear.h"

#include <algorithm>
#include <chrono>

#include "code_units.h"
#include "integers/integer_linear.h"
#include "tiles.h"

namespace penstock {
namespace {

// ---- tiles

// Where a group's part of the inputs lies.
struct Piece {
  const char* weights;
  int64_t count;        // of units or decoded steps
  const char* header;   // scales, then offsets if there are any
  const float* input_sums;  // of the first row; null without offsets
  int64_t input_sums_stride;
  bool first;
};

// ROWS rows and PANELS panels. `sums` [PANELS][sums_stride], rows of 32, grow by the piece's share.
template <class Unit, int ROWS, int PANELS>
void tile(const CodeTables& tables, const char* input, int64_t stride, const Piece& piece,
          int64_t panel_bytes, float* sums, int64_t sums_stride, Fetch fetch) {
  const Unit unit(tables);
  Vec lo[PANELS][ROWS], hi[PANELS][ROWS];
#pragma GCC unroll 2
  for (int q = 0; q < PANELS; q++)
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) lo[q][r] = hi[q][r] = set1(0.f);
  // A pointer to every third row: the two after it are reached by scaled addressing.
  const char *a = input, *b = input + 3 * stride, *c = input + 6 * stride, *d = input + 9 * stride;
  const char* weights = piece.weights;
  int64_t at = 0;
  for (int64_t u = 0; u < piece.count; u++, weights += Unit::BYTES) {
    prefetch(fetch.from);
    prefetch(fetch.from + fetch.second);
    fetch.from += fetch.stride;
    Vec w_lo[PANELS][Unit::STEPS], w_hi[PANELS][Unit::STEPS];
#pragma GCC unroll 2
    for (int q = 0; q < PANELS; q++) unit.decode(weights + q * panel_bytes, w_lo[q], w_hi[q]);
#pragma GCC unroll 4
    for (int i = 0; i < Unit::STEPS; i++, at += Unit::INPUT_BYTES)
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const char* third = r < 3 ? a : r < 6 ? b : r < 9 ? c : d;
#pragma GCC unroll 2
        for (int q = 0; q < PANELS; q++)
          Unit::multiply(third + (r % 3) * stride + at, w_lo[q][i], w_hi[q][i], lo[q][r], hi[q][r]);
      }
  }
#pragma GCC unroll 2
  for (int q = 0; q < PANELS; q++) {
    const char* header = piece.header + q * panel_bytes;
    const Vec scale_lo = load(header), scale_hi = load(header + LANES * 4);
    Vec offset_lo = set1(0.f), offset_hi = set1(0.f);
    if (piece.input_sums) {
      offset_lo = load(header + PANEL * 4);
      offset_hi = load(header + (PANEL + LANES) * 4);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      float* const total = sums + q * sums_stride + r * PANEL;
      Vec total_lo = set1(0.f), total_hi = set1(0.f);
      if (!piece.first) total_lo = load(total), total_hi = load(total + LANES);
      total_lo = fma(scale_lo, lo[q][r], total_lo);
      total_hi = fma(scale_hi, hi[q][r], total_hi);
      if (piece.input_sums) {
        const Vec x = set1(piece.input_sums[r * piece.input_sums_stride]);
        total_lo = fma(offset_lo, x, total_lo);
        total_hi = fma(offset_hi, x, total_hi);
      }
      store(total, total_lo);
      store(total + LANES, total_hi);
    }
  }
}

using Tile = void (*)(const CodeTables&, const char*, int64_t, const Piece&, int64_t, float*,
                      int64_t, Fetch);

template <class Unit>
Tile tile_of(int64_t rows) {
  static_assert(MOST_ROWS <= 12, "a case for each number of rows");
  switch (rows) {
    case 1: return tile<Unit, 1, 1>;
#define PENSTOCK_ROWS(n) \
  case n:                \
    return tile<Unit, n <= MOST_ROWS ? n : 1, 1>;
    PENSTOCK_ROWS(2) PENSTOCK_ROWS(3) PENSTOCK_ROWS(4) PENSTOCK_ROWS(5) PENSTOCK_ROWS(6)
    PENSTOCK_ROWS(7) PENSTOCK_ROWS(8) PENSTOCK_ROWS(9) PENSTOCK_ROWS(10) PENSTOCK_ROWS(11)
#undef PENSTOCK_ROWS
    default: return tile<Unit, MOST_ROWS, 1>;
  }
}

// ---- panels

template <class Unit>
void decode_piece(const CodeTables& tables, const char* weights, int64_t units, char* decoded) {
  const Unit unit(tables);
  for (int64_t u = 0; u < units; u++, weights += UNIT_BYTES) {
    Vec lo[Unit::STEPS], hi[Unit::STEPS];
    unit.decode(weights, lo, hi);
#pragma GCC unroll 4
    for (int i = 0; i < Unit::STEPS; i++, decoded += STEP_BYTES) {
      store(decoded, lo[i]);
      store(decoded + STEP_BYTES / 2, hi[i]);
    }
  }
}

// All rows with a piece that has been decoded; the first tile fetches what `next` begins.
template <class Unit>
void multiply_decoded(const Matrix& matrix, const RowBlock& block, const char* input, Piece piece,
                      const char* next, float* sums) {
  const int64_t tiles = divided_up(block.rows, MOST_ROWS);
  const float* const input_sums = piece.input_sums;
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t row = block.rows * t / tiles, rows = block.rows * (t + 1) / tiles - row;
    if (input_sums) piece.input_sums = input_sums + row * piece.input_sums_stride;
    const Fetch fetch = t ? Fetch{next, 0, 0} : Fetch{next, 0, UNIT_BYTES / Unit::STEPS};
    tile_of<Decoded<typename Unit::Arithmetic>>(rows)(
        matrix.tables, input + row * block.input_stride, block.input_stride, piece, 0,
        sums + row * PANEL, 0, fetch);
  }
}

template <class Unit>
void sum(const Matrix& matrix, const RowBlock& block, int64_t first, int64_t panels,
         bool in_registers, LinearScratch& scratch) {
  constexpr int64_t most_units = PIECE_STEPS / Unit::STEPS;
  const int64_t ahead = block.rows <= FEW_ROWS ? AHEAD_FEW_ROWS : AHEAD;
  float* const sums = scratch.sums.data();
  const char* input = block.input;
  const char* group = matrix.panel(first);
  Piece piece{nullptr, 0, group, nullptr, input_pieces(matrix), true};
  if (matrix.coding.offsets) piece.input_sums = scratch.input_sums.data();
  for (int64_t g = 0; g < matrix.groups; g++) {
    const int64_t units = std::min(matrix.group_units, matrix.units - g * matrix.group_units);
    piece.header = group;
    for (int64_t begin = 0; begin < units; begin += most_units) {
      piece.count = std::min(most_units, units - begin);
      piece.weights = group + matrix.header_bytes + begin * UNIT_BYTES;
      const int64_t steps = piece.count * Unit::STEPS;
      if (in_registers) {
        const Fetch fetch{piece.weights + ahead, panels == 2 ? matrix.panel_bytes : 0, UNIT_BYTES};
        (panels == 2 ? tile<Unit, 1, 2> : tile_of<Unit>(block.rows))(
            matrix.tables, input, block.input_stride, piece, matrix.panel_bytes, sums, PANEL,
            fetch);
      } else {
        const char* const next = piece.weights + piece.count * UNIT_BYTES;
        decode_piece<Unit>(matrix.tables, piece.weights, piece.count, scratch.piece.data());
        piece.weights = scratch.piece.data();
        piece.count = steps;
        multiply_decoded<Unit>(matrix, block, input, piece, next, sums);
      }
      input += steps * Unit::INPUT_BYTES;
      if (piece.input_sums) piece.input_sums++;
      piece.first = false;
    }
    group += matrix.header_bytes + matrix.group_units * UNIT_BYTES;
  }
}

void sum_by(const Matrix& matrix, const RowBlock& block, int64_t first, int64_t panels,
            bool in_registers, LinearScratch& scratch) {
  const bool four = has_four_bits(matrix.coding.codes);
#if defined(__AVX512BF16__)
  if (matrix.type == Type::BF16)
    return (four ? sum<FourBitHalves> : sum<ByteHalves>)(matrix, block, first, panels,
                                                         in_registers, scratch);
#endif
  (four ? sum<FourBitFloats> : sum<ByteFloats>)(matrix, block, first, panels, in_registers, scratch);
}

// Inputs of a piece: those of PIECE_STEPS steps.
int64_t piece_inputs(const Matrix& matrix) {
  return PIECE_STEPS * (activation_type(matrix.type) == Type::BF16 ? 2 : 1);
}

template <class Load>
float sum_of(int64_t begin, int64_t end, Load at) {
  Vec total = set1(0.f);
  float rest = 0.f;
  for (; begin + LANES <= end; begin += LANES) total = total + at(begin);
  if (begin < end) {
    float lanes[LANES];
    store(lanes, at(begin));  // rows have room for whole vectors
    for (int64_t i = 0; i < end - begin; i++) rest += lanes[i];
  }
  return penstock::sum(total) + rest;
}

}  // namespace

CodeTables::CodeTables(const Coding& coding) : floats{}, halves{}, low{}, high{}, minus_zero(0x80) {
  fp8 = coding.codes == Codes::FP8;
  std::memcpy(floats, coding.values, sizeof floats);
  for (int i = 0; i < 32; i++) halves[i] = to_bf16(floats[i % 16]);
  if (coding.codes == Codes::INT8) minus_zero = static_cast<uint8_t>(to_bf16(-128.f) >> 8);
  for (int i = 0; i < 128; i++) {
    const bf16 value = to_bf16(fp8 ? fp8_value(static_cast<uint8_t>(i)) : static_cast<float>(i));
    low[i] = static_cast<uint8_t>(value);
    high[i] = static_cast<uint8_t>(value >> 8);
  }
}

int64_t panels_together(const Matrix& matrix, int64_t rows) {
  const bool decoded = matrix.is_coded() && !matrix.coding.integers;
  return decoded && rows == 1 && matrix.register_rows >= 1 ? 2 : 1;
}

int64_t input_pieces(const Matrix& matrix) {
  const int64_t inputs = matrix.group_units * unit_inputs(matrix.coding);
  const int64_t each = divided_up(inputs, piece_inputs(matrix));
  return matrix.groups * each;
}

void sum_inputs(const Matrix& matrix, const RowBlock& block, LinearScratch& scratch) {
  const int64_t group = matrix.group_units * unit_inputs(matrix.coding);
  const bool halves = activation_type(matrix.type) == Type::BF16;
  for (int64_t r = 0; r < block.rows; r++) {
    const char* row = block.input + r * block.input_stride;
    float* out = scratch.input_sums.data() + r * input_pieces(matrix);
    for (int64_t g = 0; g < matrix.inputs; g += group)
      for (int64_t begin = g; begin < std::min(matrix.inputs, g + group);
           begin += piece_inputs(matrix)) {
        const int64_t end = std::min({matrix.inputs, g + group, begin + piece_inputs(matrix)});
        *out++ = halves ? sum_of(begin, end,
                                 [&](int64_t k) {
                                   return load_bf16(reinterpret_cast<const bf16*>(row) + k);
                                 })
                        : sum_of(begin, end, [&](int64_t k) { return load(row + 4 * k); });
      }
  }
}

void sum_coded(const Matrix& matrix, const RowBlock& block, int64_t first, int64_t panels,
               LinearScratch& scratch) {
  if (matrix.coding.integers) return sum_integers(matrix, block, first, scratch.sums.data());
  sum_by(matrix, block, first, panels, block.rows <= matrix.register_rows, scratch);
}

int most_register_rows(const Matrix& matrix) {
  if (matrix.coding.integers) return 0;
  const int64_t stride = padded_row(matrix.inputs * 4), panels = std::min<int64_t>(matrix.panels, 16);
  const Memory input(static_cast<size_t>(MOST_ROWS * stride));
  LinearScratch scratch;
  scratch.fit(matrix);
  const auto time = [&](int64_t rows, bool in_registers) {
    const RowBlock block{input.data(), stride, nullptr, 0, rows};
    int64_t best = INT64_MAX;
    for (int repeat = 0; repeat < 5; repeat++) {
      const auto begin = std::chrono::steady_clock::now();
      for (int64_t p = 0; p < panels; p++) sum_by(matrix, block, p, 1, in_registers, scratch);
      const auto took = std::chrono::steady_clock::now() - begin;
      best = std::min<int64_t>(
          best, std::chrono::duration_cast<std::chrono::nanoseconds>(took).count());
    }
    return best;
  };
  int most = 0;
  for (int rows = 1; rows <= MOST_ROWS; rows++)
    if (time(rows, true) <= time(rows, false)) most = rows;
  return most;
}

}  // namespace penstock
