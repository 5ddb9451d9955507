// Linear layers over packed weights.
//
// Weights lie in panels of 32 outputs, and a panel is cut into steps. A step has 128 bytes: the
// weights of one input (float) or of two (bf16, side by side) for all 32 outputs. With HALVES_APART
// all steps of the first 16 outputs come before those of the others. A gated layer's panel has 16
// outputs of the gate and the same 16 of what it gates. What is missing to a whole panel or step is
// zero. Weights in few bits lie as codes.h says, and those with short exponents as short_exponents.h:
// there a missing output has any weights.
//
// Each output is one chain of fused multiply-adds over the inputs in their order, and then its
// epilogue. (Coded weights have a chain for each piece, and one over the pieces.) So its bits
// depend neither on the rows beside it nor on who computes them.
#pragma once

#include <memory>
#include <vector>

#include "codes.h"
#include "short_exponents.h"
#include "../machine/elementary.h"
#include "../machine/memory.h"

namespace penstock {

// SPLIT: of rows alone, see split_rows.h. INT8: of the cache alone, see kv_layout.h. WIDENED: of
// weights alone, floats that are kept as bf16, which can hold them.
enum class Type : int32_t { FLOAT, BF16, SPLIT, INT8, WIDENED };

constexpr int PANEL = 2 * LANES;
constexpr int STEP_BYTES = PANEL * 4;

struct Matrix {
  // Its weights lie in `arena`. Throws std::invalid_argument for a coding, or exponents, that cannot
  // be.
  Matrix(Arena& arena, int64_t outputs, int64_t inputs, Type type, bool gated,
         const Coding& coding = Coding(), const ShortExponents* exponents = nullptr);

  // Packs rows [count, inputs] of `source`, to outputs `first` and after. Of a gated matrix `part`
  // 0 is the gate and 1 what is gated; otherwise it is 0.
  void fill(const void* source, Type source_type, int64_t first, int64_t count, int part);
  // The same of a coded matrix: codes [count, inputs], scales and offsets [count, groups].
  void fill(const uint8_t* codes, const float* scales, const float* offsets, int64_t first,
            int64_t count, int part);
  bool is_coded() const { return coding.codes != Codes::NONE; }
  bool is_short() const { return short_code != nullptr; }
  int64_t bytes() const;  // of its weights
  const char* panel(int64_t index) const { return weights + index * panel_bytes; }
  int64_t panel_outputs() const { return gated ? LANES : PANEL; }

  int64_t outputs;  // of a gated matrix: after gating
  int64_t inputs;
  int64_t panels;
  Type type;  // what its weights are, or what activations its codes are multiplied with
  bool gated;
  Coding coding;
  CodeTables tables;
  int64_t steps;  // of weights that are not coded
  int64_t panel_bytes;
  // Of coded weights. The last group may be shorter.
  int64_t units = 0, group_units = 0, groups = 0, header_bytes = 0;
  int register_rows = 0;  // see most_register_rows
  std::unique_ptr<ShortCode> short_code;
  char* weights;
};

// The type in which activations are multiplied with such weights.
constexpr Type activation_type(Type weights) {
  return weights == Type::BF16 && HAS_BF16_DOT ? Type::BF16 : Type::FLOAT;
}

// Bytes of a row, before it is padded.
constexpr int64_t row_bytes(int64_t columns, Type type) {
  if (type == Type::SPLIT) return SplitRow{columns}.bytes();
  return columns * (type == Type::BF16 ? 2 : 4);
}

// Whether each value is one that bf16 has, too.
bool fits_bf16(const float* values, int64_t count);

struct Epilogue {
  const float* bias = nullptr;  // [panels * 32], in the order of the packed outputs; or none
  Activation activation = Activation::NONE;
  Clamp clamp;
  float scale = 1.f;
  float softcap = 0.f;  // 0: none
  bool add = false;     // to what the destination (float) holds
  Type type = Type::FLOAT;
};

struct RowBlock {
  const char* input;  // rows of input_type(matrix)
  int64_t input_stride;
  char* output;  // the matrix's outputs, of epilogue.type
  int64_t output_stride;
  int64_t rows;
};

// The type of the rows that a matrix is multiplied with.
inline Type input_type(const Matrix& matrix) {
  return matrix.coding.integers ? Type::SPLIT : activation_type(matrix.type);
}

constexpr int64_t MOST_BLOCK_ROWS = 480;

// Rows that one item should take: so many that their inputs stay in the second-level cache.
int64_t block_rows(const Matrix& matrix);

// What one thread needs beside the rows.
struct LinearScratch {
  // Makes room for a matrix.
  void fit(const Matrix& matrix);
  std::vector<float> sums;        // 32 a row, of up to two panels
  std::vector<float> input_sums;  // of each row and piece
  Memory piece;                   // decoded weights
};

// Panels first .. last - 1 of a block of at most MOST_BLOCK_ROWS rows.
void multiply(const Matrix& matrix, const Epilogue& epilogue, const RowBlock& block, int64_t first,
              int64_t last, LinearScratch& scratch);

// Sixteen neighbouring outputs of one row, `first` being a multiple of 16: the same bits. Of weights
// that are not coded, without bias or activation, and not where HALVES_APART.
Vec multiply_few(const Matrix& matrix, const Epilogue& epilogue, const char* row, int64_t first);

}  // namespace penstock
