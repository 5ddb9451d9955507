#include "attention.h"

#include <algorithm>
#include <cmath>

#include "span_products.h"

namespace penstock {
namespace {

// Softmax of one row's scores in a span: exponentials relative to the largest, which it returns with
// their sum. A row that sees nothing of the span gets zeros, -infinity and 0.
struct Softened {
  float most, total;
};

Softened soften(const Attention& a, const Span& span, int64_t begin, int64_t end, float* scores) {
  const Vec nothing = set1(-INFINITY), scale = set1(a.scale);
  Vec high = nothing;
  for (int64_t g = 0; g < span.count; g++) {
    const int64_t first = span.positions[g];
    Vec s = load(scores + g * GROUP) * scale;
    if (a.softcap > 0.f) s = set1(a.softcap) * tanh(s * set1(1.f / a.softcap));
    const int64_t last = std::min(end - first, span.keys[g]);
    if (begin > first || last < GROUP)
      s = keep(s, static_cast<int>(std::clamp<int64_t>(begin - first, 0, GROUP)),
               static_cast<int>(std::clamp<int64_t>(last, 0, GROUP)), nothing);
    high = max(high, s);
    store(scores + g * GROUP, s);
  }
  const float most = largest(high);
  if (most == -INFINITY) {
    for (int64_t g = 0; g < span.count; g++) store(scores + g * GROUP, set1(0.f));
    return {most, 0.f};
  }
  Vec sums = set1(0.f);
  const Vec shift = set1(most);
  for (int64_t g = 0; g < span.count; g++) {
    const Vec s = load(scores + g * GROUP);
    const Vec e = where_less(nothing, s, exp(s - shift), set1(0.f));
    sums = sums + e;
    store(scores + g * GROUP, e);
  }
  return {most, sum(sums)};
}

float decay(float difference) {
  float lanes[LANES];
  store(lanes, exp(set1(difference)));
  return lanes[0];
}

// Adds the next span's sums to those of the spans before it. (Milakov & Gimelshein 2018,
// https://arxiv.org/abs/1805.02867)
void join(const PartialSums& sums, const PartialSums& next, int64_t rows, int64_t dims) {
  for (int64_t i = 0; i < rows; i++) {
    if (next.most[i] == -INFINITY) continue;
    float *to = sums.values + i * dims, *from = next.values + i * dims;
    if (sums.most[i] == -INFINITY) {
      sums.most[i] = next.most[i];
      sums.total[i] = next.total[i];
      std::copy_n(from, dims, to);
    } else if (next.most[i] <= sums.most[i]) {
      const float factor = decay(next.most[i] - sums.most[i]);
      sums.total[i] += next.total[i] * factor;
      for (int64_t d = 0; d < dims; d += LANES)
        store(to + d, fma(load(from + d), set1(factor), load(to + d)));
    } else {
      const float factor = decay(sums.most[i] - next.most[i]);
      sums.most[i] = next.most[i];
      sums.total[i] = sums.total[i] * factor + next.total[i];
      for (int64_t d = 0; d < dims; d += LANES)
        store(to + d, fma(load(to + d), set1(factor), load(from + d)));
    }
  }
}

// Where the groups of a sequence's keys and values lie, for one key/value head.
struct Groups {
  const KVLayout& layout;
  const int32_t* table;
  int64_t kv_head;
  const char *keys, *values;
  int64_t first, last;  // that the item sees

  Groups(const Attention& a, const KVLayout& kv_layout, const StepInput& step,
         const AttentionItem& item)
      : layout(kv_layout),
        kv_head(item.head / a.heads_per_kv()),
        keys(static_cast<const char*>(step.keys[a.layer])),
        values(static_cast<const char*>(step.values[a.layer])) {
    const KVKind& kv = step.kv[step.layer_kinds[a.layer]];
    table = kv.tables + item.tile.sequence * kv.table_width;
    const int64_t position = step.positions[item.tile.row];
    const int64_t seen = at(a.window ? std::max<int64_t>(0, position - a.window + 1) : 0);
    first = std::max(seen, item.first * SPAN);
    last = std::min(at(step.positions[item.tile.row + item.tile.rows - 1]), item.end * SPAN - 1);
  }
  int64_t at(int64_t position) const {
    return position / layout.block_size * layout.groups() + position % layout.block_size / GROUP;
  }
  int64_t place(int64_t group) const {
    return layout.group(table[group / layout.groups()], kv_head, group % layout.groups());
  }
  const char* key(int64_t group) const { return keys + place(group) * layout.key_group_bytes(); }
  const char* value(int64_t group) const {
    return values + place(group) * layout.value_group_bytes();
  }
};

// An item's rows, and what they do with a span of keys.
template <class Keys>
struct ItemRows {
  const Attention& a;
  const KVLayout& layout;
  const StepInput& step;
  const AttentionItem& item;
  AttentionScratch& scratch;
  const int64_t count = item.count, rows = item.tile.rows * count;
  const int64_t words = layout.key_words(), dims = layout.value_row();
  const int64_t value_bytes = dims * Keys::VALUE_BYTES;
  const int64_t stride = padded_row(words * Keys::QUERY_BYTES);
  const int64_t tiles = divided_up(rows, MOST_ROWS);
  const int64_t per_block = layout.groups();
  const int64_t end = step.positions[item.tile.row + item.tile.rows - 1] + 1;  // of the last row

  int64_t row_of(int64_t i) const { return item.tile.row + i / count; }
  int64_t head_of(int64_t i) const { return item.head + i % count; }
  int64_t tile_begin(int64_t t) const { return rows * t / tiles; }

  // Queries in the form in which they meet keys; the place after an odd last dim holds zero.
  void take(const char* query, int64_t query_stride) const {
    for (int64_t i = 0; i < rows; i++) {
      const auto* from = reinterpret_cast<const float*>(query + row_of(i) * query_stride) +
                         head_of(i) * a.key_dim;
      char* to = scratch.query.data() + i * stride;
      if (Keys::VALUE_BYTES == 2 && Keys::QUERY_BYTES == 4) {
        auto* halves = reinterpret_cast<bf16*>(to);
        for (int64_t d = 0; d < a.key_dim; d += LANES) {
          const int here = static_cast<int>(std::min<int64_t>(LANES, a.key_dim - d));
          store_first_bf16(halves + d, load_first(from + d, here), here);
        }
        if (a.key_dim % 2) halves[a.key_dim] = 0;
      } else {
        std::memcpy(to, from, static_cast<size_t>(a.key_dim) * 4);
        if (a.key_dim % 2) std::memset(to + a.key_dim * 4, 0, 4);
      }
    }
  }

  // Pointers to groups from .. to - 1 in scratch.groups: keys, values, then the keys that come next,
  // here or in the thread's next item. All are fetched ahead.
  Span span(const Groups& own, const Groups& after, int64_t from, int64_t to) const {
    const int64_t n = to - from;
    const char** groups = scratch.groups.data();
    for (int64_t g = 0; g < n; g++) {
      groups[g] = own.key(from + g);
      groups[n + g] = own.value(from + g);
    }
    for (int64_t g = 0; g < AHEAD; g++)
      groups[2 * n + g] = to + g <= own.last
                              ? own.key(to + g)
                              : after.key(std::min(after.first + to + g - own.last - 1, after.last));
    Span span{groups + n, n, {}, {}};
    for (int64_t g = 0; g < n; g++) {
      const int64_t in_block = (from + g) % per_block * GROUP;
      span.positions[g] = (from + g) / per_block * layout.block_size + in_block;
      span.keys[g] = std::min({int64_t{GROUP}, layout.block_size - in_block, end - span.positions[g]});
    }
    return span;
  }

  void see(const Span& span, const PartialSums& sums) const {
    float* scores = reinterpret_cast<float*>(scratch.scores.data());
    for (int64_t t = 0; t < tiles; t++)
      score_rows<Keys>(static_cast<int>(tile_begin(t + 1) - tile_begin(t)),
                       scratch.query.data() + tile_begin(t) * stride, stride, scratch.groups.data(),
                       span.count, words, scores + tile_begin(t) * SCORE_STRIDE);
    for (int64_t i = 0; i < rows; i++) {
      const int64_t position = step.positions[row_of(i)];
      const int64_t sees = a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
      float* weights = scores + i * SCORE_STRIDE;
      const Softened of = soften(a, span, sees, position + 1, weights);
      sums.most[i] = of.most;
      sums.total[i] = of.total;
      if (Keys::SCALED)
        for (int64_t g = 0; g < span.count; g++)
          store(weights + g * GROUP, load(weights + g * GROUP) *
                                         scales(span.values[g] + GROUP * value_bytes));
    }
    std::fill_n(sums.values, rows * dims, 0.f);
    for (int64_t t = 0; t < tiles; t++) {
      const int part = static_cast<int>(tile_begin(t + 1) - tile_begin(t));
      const float* weights = scores + tile_begin(t) * SCORE_STRIDE;
      float* out = sums.values + tile_begin(t) * dims;
      int64_t d = 0;
      for (; d + 2 * LANES <= dims; d += 2 * LANES)
        weigh_rows<Keys, 2>(part, weights, span, d * Keys::VALUE_BYTES, value_bytes, out + d, dims);
      if (d < dims)
        weigh_rows<Keys, 1>(part, weights, span, d * Keys::VALUE_BYTES, value_bytes, out + d, dims);
    }
  }

  void put(const PartialSums& sums, char* output, int64_t output_stride, Type type) const {
    for (int64_t i = 0; i < rows; i++) {
      float factor = 1.f / sums.total[i];
      if (!a.sinks.empty()) {
        // One more logit in the softmax, with nothing to add to the output.
        const float sink = a.sinks[static_cast<size_t>(head_of(i))];
        const float own = sums.most[i], high = std::max(own, sink);
        const float weight = std::exp(own - high);
        factor = weight / (sums.total[i] * weight + std::exp(sink - high));
      }
      char* row = output + row_of(i) * output_stride;
      const int64_t column = head_of(i) * a.value_dim;
      for (int64_t d = 0; d < a.value_dim; d += LANES) {
        const Vec v = load(sums.values + i * dims + d) * set1(factor);
        const int here = static_cast<int>(std::min<int64_t>(LANES, a.value_dim - d));
        if (type == Type::BF16)
          store_first_bf16(reinterpret_cast<bf16*>(row) + column + d, v, here);
        else
          store_first(reinterpret_cast<float*>(row) + column + d, v, here);
      }
    }
  }
};

template <class Keys>
void attend_as(const Attention& a, const KVLayout& layout, const StepInput& step,
               const AttentionItem& item, const AttentionItem* next, const char* query,
               int64_t query_stride, char* output, int64_t output_stride, Type output_type,
               AttentionScratch& scratch) {
  const ItemRows<Keys> of{a, layout, step, item, scratch};
  const Groups own(a, layout, step, item), after(a, layout, step, next ? *next : item);
  const int64_t rows = of.rows;
  SharedSpans* shared = item.shared;
  PartialSums joined(reinterpret_cast<float*>(scratch.joined.data()), rows);
  const PartialSums fresh(reinterpret_cast<float*>(scratch.sums.data()), rows);
  of.take(query, query_stride);
  for (int64_t from = own.first; from <= own.last;) {
    const int64_t index = from / SPAN, to = std::min((index + 1) * SPAN, own.last + 1);
    const PartialSums sums = shared             ? PartialSums(shared->span(index), rows)
                             : index == item.first ? joined
                                                   : fresh;
    of.see(of.span(own, after, from, to), sums);
    if (!shared && index > item.first) join(joined, fresh, rows, of.dims);
    from = to;
  }
  if (shared) {
    if (shared->missing.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    shared->missing.store(shared->items, std::memory_order_relaxed);  // for the next layer
    joined = PartialSums(shared->span(shared->first), rows);
    for (int64_t index = shared->first + 1; index < shared->end; index++)
      join(joined, PartialSums(shared->span(index), rows), rows, of.dims);
  }
  of.put(joined, output, output_stride, output_type);
}

}  // namespace

void AttentionScratch::fit(const Attention& a, Type type) {
  const KVLayout layout{GROUP, a.kv_heads, a.key_dim, a.value_dim, type};
  const int64_t rows = tile_rows(a.heads_per_kv()) * a.heads_per_kv();
  const auto grow = [](Memory& memory, int64_t& bytes, int64_t wanted) {
    if (wanted > bytes) memory = Memory(static_cast<size_t>(bytes = wanted));
  };
  grow(query, query_bytes, rows * padded_row(layout.key_words() * 8));
  grow(scores, score_bytes, rows * SCORE_STRIDE * 4);
  grow(sums, sum_bytes, PartialSums::floats(rows, a.value_row()) * 4);
  grow(joined, joined_bytes, sum_bytes);
  groups.resize(2 * SPAN + AHEAD);
}

void attend(const Attention& attention, const KVLayout& layout, const StepInput& step,
            const AttentionItem& item, const AttentionItem* next, const char* query,
            int64_t query_stride, char* output, int64_t output_stride, Type output_type,
            AttentionScratch& scratch) {
  const auto run = layout.type == Type::BF16   ? attend_as<HalfKeys>
                   : layout.type == Type::INT8 ? attend_as<ByteKeys>
                                               : attend_as<FloatKeys>;
  run(attention, layout, step, item, next, query, query_stride, output, output_stride, output_type,
      scratch);
}

}  // namespace penstock
