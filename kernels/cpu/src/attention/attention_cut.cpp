#include <algorithm>

#include "../machine/pool.h"
#include "attention.h"
#include "span_products.h"

namespace penstock {
namespace {

// Rows of all query heads of a key/value head that are computed together, about.
constexpr int64_t ROWS_TOGETHER = 48;
// Below so many items for each thread, query heads of a key/value head go separate ways.
constexpr int64_t FEW_ITEMS = 3;

}  // namespace

int64_t tile_rows(int64_t heads_per_kv) { return std::max<int64_t>(1, ROWS_TOGETHER / heads_per_kv); }

AttentionCut::AttentionCut(const Attention& a)
    : heads_(a.heads), kv_heads_(a.kv_heads), window_(a.window), value_row_(a.value_row()) {}

bool AttentionCut::fits(const Attention& a) const {
  return a.heads == heads_ && a.kv_heads == kv_heads_ && a.window == window_ &&
         a.value_row() == value_row_;
}

void AttentionCut::make_tiles(const StepInput& s) {
  tiles_.clear();
  const auto most = static_cast<int32_t>(tile_rows(heads_ / kv_heads_));
  const int64_t groups = divided_up(s.block_size, GROUP);
  const auto span_of = [&](int64_t position) {
    return (position / s.block_size * groups + position % s.block_size / GROUP) / SPAN;
  };
  for (int32_t q = 0; q < s.sequences; q++)
    for (int32_t r = s.query_starts[q]; r < s.query_starts[q + 1]; r += most) {
      const QueryTile tile{q, r, std::min(most, s.query_starts[q + 1] - r)};
      const int64_t sees = window_ ? std::max<int64_t>(0, s.positions[r] - window_ + 1) : 0;
      tiles_.push_back({tile, span_of(sees), span_of(s.positions[r + tile.rows - 1]) + 1});
    }
}

void AttentionCut::add_items(const Spans& spans, int64_t head, int64_t count, int64_t most_spans) {
  const int64_t all = spans.end - spans.first, pieces = divided_up(all, most_spans);
  SharedSpans* shared = nullptr;
  if (pieces > 1) {
    shared = &shared_.emplace_back();
    shared->floats = PartialSums::floats(spans.tile.rows * count, value_row_);
    shared->first = spans.first;
    shared->end = spans.end;
    shared->items = static_cast<int32_t>(pieces);
    shared->missing.store(shared->items);
  }
  for (int64_t p = 0; p < pieces; p++)
    items_.push_back({spans.tile, head, count, spans.first + all * p / pieces,
                      spans.first + all * (p + 1) / pieces, shared});
}

void AttentionCut::cut(const StepInput& step, int threads) {
  make_tiles(step);
  int64_t spans = 0;
  for (const Spans& tile : tiles_) spans += tile.end - tile.first;
  // Alone a thread has nobody to share with.
  const int64_t most_spans =
      threads == 1 ? spans : std::max<int64_t>(1, spans * kv_heads_ / (ITEMS_PER_THREAD * threads));
  const auto add_all = [&](int64_t together) {
    items_.clear();
    shared_.clear();
    for (const Spans& tile : tiles_)
      for (int64_t head = 0; head < heads_; head += together)
        add_items(tile, head, together, most_spans);
  };
  add_all(heads_ / kv_heads_);
  if (size() < FEW_ITEMS * threads) add_all(1);

  int64_t floats = 0;
  for (const SharedSpans& shared : shared_) floats += (shared.end - shared.first) * shared.floats;
  memory_.resize(std::max(memory_.size(), static_cast<size_t>(floats)));
  float* at = memory_.data();
  for (SharedSpans& shared : shared_) {
    shared.memory = at;
    at += (shared.end - shared.first) * shared.floats;
  }
}

}  // namespace penstock
