// Attention of a step's rows over the paged cache.
//
// The keys of a sequence are cut into spans at fixed positions. Each span's softmax is computed for
// itself, and the spans are joined in their order (Dao et al. 2023, "Flash-Decoding for long-context
// inference"). So a row's bits are the same whether one thread computes its spans or many do.
#pragma once

#include <atomic>
#include <deque>
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
  int64_t value_row() const { return rounded_up(value_dim, LANES); }
};

// Neighbouring rows of one sequence that are computed together.
struct QueryTile {
  int32_t sequence, row, rows;
};

// The positions of one sequence that are computed together: with all query heads of a key/value
// head they make a few tens of rows.
int64_t tile_rows(int64_t heads_per_kv);

// What rows have of some of their keys: the largest score, and relative to it the sums of
// exponentials and of weighted values.
struct PartialSums {
  float *most, *total, *values;  // [rows], [rows], [rows][value row]

  PartialSums(float* memory, int64_t rows)
      : most(memory), total(memory + rows), values(memory + padded(rows)) {}
  static int64_t floats(int64_t rows, int64_t value_row) { return padded(rows) + rows * value_row; }

 private:
  static int64_t padded(int64_t rows) { return rounded_up(2 * rows, LANES); }
};

// Where items leave the spans of rows that they share. The last one to end joins all of them.
struct SharedSpans {
  float* memory;
  int64_t floats;  // of a span
  int64_t first, end;
  int32_t items;
  std::atomic<int32_t> missing;

  float* span(int64_t index) const { return memory + (index - first) * floats; }
};

// The rows of a tile and the heads head .. head + count - 1, all of one key/value head, with the
// spans first .. end - 1 of what they see; with all of them where nothing is shared.
struct AttentionItem {
  QueryTile tile;
  int64_t head, count;
  int64_t first, end;
  SharedSpans* shared;
};

// How a step's attention is cut into items, in all layers of the same heads and window.
class AttentionCut {
 public:
  explicit AttentionCut(const Attention& attention);
  bool fits(const Attention& attention) const;
  void cut(const StepInput& step, int threads);
  int64_t size() const { return static_cast<int64_t>(items_.size()); }
  const AttentionItem& item(int64_t index) const { return items_[static_cast<size_t>(index)]; }

 private:
  struct Spans {
    QueryTile tile;
    int64_t first, end;
  };
  void make_tiles(const StepInput& step);
  void add_items(const Spans& spans, int64_t head, int64_t count, int64_t most_spans);

  int64_t heads_, kv_heads_, window_, value_row_;
  std::vector<Spans> tiles_;
  std::vector<AttentionItem> items_;
  std::deque<SharedSpans> shared_;
  std::vector<float> memory_;
};

// What one thread needs while it computes an item.
struct AttentionScratch {
  void fit(const Attention& attention, Type type);
  Memory query, scores, sums, joined;
  std::vector<const char*> groups;
  int64_t query_bytes = 0, score_bytes = 0, sum_bytes = 0, joined_bytes = 0;
};

// query: float rows `query_stride` bytes apart, its heads first in a row; output: rows of all heads.
// `next` is what this thread will probably compute next, whose keys are fetched; or null.
void attend(const Attention& attention, const KVLayout& layout, const StepInput& step,
            const AttentionItem& item, const AttentionItem* next, const char* query,
            int64_t query_stride, char* output, int64_t output_stride, Type output_type,
            AttentionScratch& scratch);

}  // namespace penstock
