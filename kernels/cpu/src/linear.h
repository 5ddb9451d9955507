// Linear layers over packed weights.
//
// Weights lie in panels of 32 outputs, and a panel in steps: a step holds the weights of one input
// (float) or of two (bf16, side by side) for all 32 outputs, 128 bytes. A gated layer's panel has 16
// outputs of the gate and the same 16 of what it gates. What is missing to a whole panel or step is
// zero.
//
// Each output is one chain of fused multiply-adds over the inputs in their order, and then its
// epilogue. So its bits depend neither on the rows beside it nor on who computes them.
#pragma once

#include <vector>

#include "elementary.h"
#include "memory.h"

namespace penstock {

enum class Type : int32_t { FLOAT, BF16 };

constexpr int PANEL = 2 * LANES;
constexpr int STEP_BYTES = PANEL * 4;

struct Matrix {
  Matrix(int64_t outputs, int64_t inputs, Type type, bool gated);

  // Packs rows [count, inputs] of `source`, to outputs `first` and after. Of a gated matrix `part`
  // 0 is the gate and 1 what is gated; otherwise it is 0.
  void fill(const void* source, Type source_type, int64_t first, int64_t count, int part);
  const char* panel(int64_t index) const { return weights.data() + index * steps * STEP_BYTES; }

  int64_t outputs;  // of a gated matrix: after gating
  int64_t inputs;
  int64_t steps;
  int64_t panels;
  Type type;
  bool gated;
  Memory weights;
};

// The type in which activations are multiplied with such weights.
constexpr Type activation_type(Type weights) {
  return weights == Type::BF16 && HAS_BF16_DOT ? Type::BF16 : Type::FLOAT;
}

struct Epilogue {
  const float* bias = nullptr;  // [panels * 32], in the order of the packed outputs; or none
  Activation activation = Activation::NONE;
  float scale = 1.f;
  float softcap = 0.f;  // 0: none
  bool add = false;     // to what the destination (float) holds
  Type type = Type::FLOAT;
};

struct RowBlock {
  const char* input;  // rows of activation_type(matrix.type)
  int64_t input_stride;
  char* output;  // the matrix's outputs, of epilogue.type
  int64_t output_stride;
  int64_t rows;
};

constexpr int64_t MOST_BLOCK_ROWS = 480;

// Rows that one item should take: so many that their inputs stay in the second-level cache.
int64_t block_rows(const Matrix& matrix);

// Panels first .. last - 1 of a block of at most MOST_BLOCK_ROWS rows; `sums` holds 32 floats a row.
void multiply(const Matrix& matrix, const Epilogue& epilogue, const RowBlock& block, int64_t first,
              int64_t last, float* sums);

}  // namespace penstock
