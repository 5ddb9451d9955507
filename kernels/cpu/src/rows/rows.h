// What is computed row by row: embedding, normalisation, rotary positions and the cache's writes.
//
// A row's memory has room for whole vectors, and what lies behind its columns stays zero.
#pragma once

#include <vector>

#include "../attention/kv_layout.h"
#include "../program/step.h"

namespace penstock {

struct Embedding {
  const void* table;  // [vocabulary][columns], the caller's
  Type type;
  int64_t vocabulary, columns;
  float scale;
  void lookup(int64_t token, float* row) const;
};

// y = x / rms(x) * weight + bias, or with the mean taken off first (LayerNorm).
struct Norm {
  int64_t columns;
  bool centred;
  float epsilon;
  std::vector<float> weight;  // empty: ones
  std::vector<float> bias;    // empty: zeros
  // Reads and may overwrite x.
  void apply(const float* x, float* y) const;
};

// Where a norm's output goes.
struct NormOutput {
  Type type;
  bool add;     // to a float row, times scale
  float scale;
};
void normalise(const Norm& norm, const NormOutput& output, const float* x, char* row,
               float* scratch);

struct Rotary {
  const float* cosines = nullptr;  // [positions][dims / 2], the caller's; null: no rotation
  const float* sines = nullptr;
  int64_t positions = 0;
  int64_t dims = 0;         // of a head that turn: its first
  bool interleaved = false;  // pairs are neighbours instead of halves
};

// Rows hold query heads, then key heads, then value heads.
struct Rotate {
  int64_t heads, kv_heads, key_dim, value_dim, layer;
  Rotary rotary;
  // None, one for every head, one for each, or one over the columns of all heads.
  std::vector<Norm> query_norm, key_norm;
  int64_t input_columns() const { return (heads + kv_heads) * key_dim + kv_heads * value_dim; }
};
void rotate_and_store(const Rotate& op, const KVLayout& layout, const StepInput& step, int64_t row,
                      float* x, float* scratch);

}  // namespace penstock
