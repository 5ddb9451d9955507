// What one step computes, as the caller describes it; all memory is the caller's.
#pragma once

#include <cstdint>

namespace penstock {

// One sequence per entry of `query_starts` but the last: rows query_starts[s] .. query_starts[s+1]
// are the last positions of its context. A KV kind has its own blocks: slots and tables.
struct KVKind {
  const int64_t* slots;   // [rows]: block * block_size + offset, where a row's key and value go
  const int32_t* tables;  // [sequences][table_width]: block ids in order of position
  int64_t table_width;
  int64_t num_blocks;
};

struct StepInput {
  int64_t rows, sequences, outputs, kinds, layers, block_size;
  const int64_t* tokens;          // [rows]
  const int64_t* positions;       // [rows]
  const int32_t* query_starts;    // [sequences + 1]
  const int32_t* context_lens;    // [sequences]
  const int64_t* output_rows;     // [outputs], whose logits are wanted
  const KVKind* kv;               // [kinds]
  const int32_t* layer_kinds;     // [layers]
  void* const* keys;              // [layers]
  void* const* values;            // [layers]
  float* logits;                  // [outputs][vocabulary]
  float* largest;                 // [outputs], of each row of logits; or null
  int64_t* places;                // [outputs], the first place of it
  int64_t largest_only;           // whether anything may be left in `logits`
};

}  // namespace penstock
