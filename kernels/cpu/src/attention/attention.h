// Attention of a step's rows over the paged cache.
#pragma once

#include <vector>

#include "kv_layout.h"
#include "../program/step.h"

namespace penstock {

struct Attention {
  int64_t heads, kv_heads, key_dim, value_dim;
  float scale;
  int64_t window = 0;      // tokens a row sees, itself included; 0: all
  float softcap = 0.f;     // 0: none
  std::vector<float> sinks;  // one per head, or none
  int64_t layer;

  int64_t heads_per_kv() const { return heads / kv_heads; }
};

// Neighbouring rows of one sequence that are computed together.
struct QueryTile {
  int32_t sequence, row, rows;
};

// So many positions of one sequence that the rows of all query heads of a key/value head are few
// tens.
int64_t tile_rows(const Attention& attention);

// What one thread needs while it computes an item.
struct AttentionScratch {
  void fit(const Attention& attention, Type type);
  Memory query, scores, output;
  std::vector<float> most, total;
  std::vector<const char*> groups;
  int64_t query_bytes = 0, score_bytes = 0, output_bytes = 0;
};

// The rows of a tile and the heads head .. head + count - 1, all of one key/value head.
struct AttentionItem {
  QueryTile tile;
  int64_t head, count;
};

// query: float rows `query_stride` bytes apart, its heads first in a row; output: rows of all heads.
// `next` is what this thread will probably compute next, whose keys are fetched; or null.
void attend(const Attention& attention, const KVLayout& layout, const StepInput& step,
            const AttentionItem& item, const AttentionItem* next, const char* query,
            int64_t query_stride, char* output, int64_t output_stride, Type output_type,
            AttentionScratch& scratch);

}  // namespace penstock
