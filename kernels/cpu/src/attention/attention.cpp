#include "attention.h"

#include <algorithm>
#include <cmath>

#include "cached_keys.h"

namespace penstock {
namespace {

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12;
#elif defined(__AVX2__) || defined(__ARM_NEON)
constexpr int MOST_ROWS = 3;
#else
constexpr int MOST_ROWS = 1;
#endif

// Scores are held for so many groups at a time. The bounds are multiples of it from a sequence's
// beginning, wherever a row or its window ends. The order of sums is part of a row's bits.
constexpr int64_t SPAN = 32;
constexpr int64_t SCORE_STRIDE = SPAN * GROUP + LANES;  // floats; an odd number of cache lines
constexpr int AHEAD = 6;                                // groups fetched before they are needed
constexpr int64_t ROWS_TOGETHER = 48;

// Scores of ROWS queries with GROUPS groups of keys; group g is at groups[g], and groups[g + AHEAD]
// is what to fetch meanwhile.
template <class Keys, int ROWS, int GROUPS>
void score(const char* query, int64_t stride, const char* const* groups, int64_t words,
           float* scores) {
  Vec sums[ROWS][GROUPS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) sums[r][g] = set1(0.f);
  const char *a = query, *b = query + 3 * stride, *c = query + 6 * stride, *d = query + 9 * stride;
  for (int64_t w = 0; w < words; w++) {
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      const Keys keys(groups[g] + w * Keys::KEY_BYTES);
      if (w * Keys::KEY_BYTES % 64 == 0) prefetch(groups[g + AHEAD] + w * Keys::KEY_BYTES);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const char* third = r < 3 ? a : r < 6 ? b : r < 9 ? c : d;
        keys.multiply(third + (r % 3) * stride + w * Keys::QUERY_BYTES, sums[r][g]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      if (Keys::SCALED) sums[r][g] = sums[r][g] * scales(groups[g] + words * Keys::KEY_BYTES);
      store(scores + r * SCORE_STRIDE + g * GROUP, sums[r][g]);
    }
}

struct Span {            // of groups, one after another
  const char* const* values;  // [count + AHEAD]
  int64_t count;
  int64_t first_keys;    // keys in each group but the last of a block ...
  int64_t last_keys;     // ... in that ...
  int64_t per_block;     // ... which is one of so many ...
  int64_t first;         // ... counted from the sequence's begin.
  int64_t end_keys;      // keys of the span's very last group that are visible to any row

  int64_t keys(int64_t group) const {
    if (group == count - 1) return end_keys;
    return (first + group) % per_block == per_block - 1 ? last_keys : first_keys;
  }
};

// Adds the weighted values of a span to ROWS outputs, VECTORS * 16 dims from byte `at` of a value.
template <class Keys, int ROWS, int VECTORS>
void weigh(const float* weights, const Span& span, int64_t at, int64_t value_bytes, float* output,
           int64_t stride) {
  Vec sums[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load(output + r * stride + v * LANES);
  const float *a = weights, *b = a + 3 * SCORE_STRIDE, *c = a + 6 * SCORE_STRIDE,
              *d = a + 9 * SCORE_STRIDE;
  for (int64_t g = 0; g < span.count; g++) {
    const char* value = span.values[g] + at;
    const char* next = span.values[g + AHEAD] + at;
    const int64_t keys = span.keys(g);
    for (int64_t k = 0; k < keys; k++, value += value_bytes, next += value_bytes) {
      Vec x[VECTORS];
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) {
        x[v] = Keys::values(value + v * LANES * Keys::VALUE_BYTES);
        prefetch(next + v * LANES * Keys::VALUE_BYTES);
      }
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const float* third = r < 3 ? a : r < 6 ? b : r < 9 ? c : d;
        const Vec weight = set1(third[(r % 3) * SCORE_STRIDE + g * GROUP + k]);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sums[r][v] = fma(weight, x[v], sums[r][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) store(output + r * stride + v * LANES, sums[r][v]);
}

#define PENSTOCK_EACH_ROWS(CASE)                                                             \
  CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) \
      CASE(12)

template <class Keys, int ROWS>
void score_span(const char* query, int64_t stride, const char* const* groups, int64_t count,
                int64_t words, float* scores) {
  constexpr int WIDE = 2 * ROWS <= MOST_ROWS ? 4 : MOST_ROWS > 1 ? 2 : 1;
  int64_t g = 0;
  for (; g + WIDE <= count; g += WIDE)
    score<Keys, ROWS, WIDE>(query, stride, groups + g, words, scores + g * GROUP);
  for (; g < count; g++)
    score<Keys, ROWS, 1>(query, stride, groups + g, words, scores + g * GROUP);
}

template <class Keys>
void score_rows(int rows, const char* query, int64_t stride, const char* const* groups,
                int64_t count, int64_t words, float* scores) {
  switch (rows) {
#define PENSTOCK_CASE(n) \
  case n:                \
    return score_span<Keys, (n <= MOST_ROWS ? n : 1)>(query, stride, groups, count, words, scores);
    PENSTOCK_EACH_ROWS(PENSTOCK_CASE)
#undef PENSTOCK_CASE
  }
}

template <class Keys, int VECTORS>
void weigh_rows(int rows, const float* weights, const Span& span, int64_t at, int64_t value_bytes,
                float* output, int64_t stride) {
  switch (rows) {
#define PENSTOCK_CASE(n) \
  case n:                \
    return weigh<Keys, (n <= MOST_ROWS ? n : 1), VECTORS>(weights, span, at, value_bytes, output, stride);
    PENSTOCK_EACH_ROWS(PENSTOCK_CASE)
#undef PENSTOCK_CASE
  }
}

// Softmax of one row's scores in a span, online: `most` and `total` are the row's largest score and
// its sum of exponentials so far. Returns the factor for what was summed before; a row that sees
// nothing of the span gets zeros and the factor 1. (Milakov & Gimelshein 2018,
// https://arxiv.org/abs/1805.02867)
float soften(const Attention& a, const Span& span, int64_t block_size, int64_t begin, int64_t end,
             float* scores, float& most, float& total) {
  const Vec nothing = set1(-INFINITY), scale = set1(a.scale);
  Vec high = nothing;
  for (int64_t g = 0; g < span.count; g++) {
    const int64_t index = span.first + g;
    const int64_t first = index / span.per_block * block_size + index % span.per_block * GROUP;
    Vec s = load(scores + g * GROUP) * scale;
    if (a.softcap > 0.f) s = set1(a.softcap) * tanh(s * set1(1.f / a.softcap));
    const int64_t last = std::min(end - first, span.keys(g));
    if (begin > first || last < GROUP)
      s = keep(s, static_cast<int>(std::clamp<int64_t>(begin - first, 0, GROUP)),
               static_cast<int>(std::clamp<int64_t>(last, 0, GROUP)), nothing);
    high = max(high, s);
    store(scores + g * GROUP, s);
  }
  const float before = most;
  most = std::max(before, largest(high));
  if (most == -INFINITY) {
    for (int64_t g = 0; g < span.count; g++) store(scores + g * GROUP, set1(0.f));
    return 1.f;
  }
  Vec sums = set1(0.f);
  const Vec shift = set1(most);
  for (int64_t g = 0; g < span.count; g++) {
    const Vec s = load(scores + g * GROUP);
    const Vec e = where_less(nothing, s, exp(s - shift), set1(0.f));
    sums = sums + e;
    store(scores + g * GROUP, e);
  }
  if (before == -INFINITY) {
    total = sum(sums);
    return 1.f;  // nothing was summed before
  }
  float factor[LANES];
  store(factor, exp(set1(before - most)));
  total = total * factor[0] + sum(sums);
  return factor[0];
}

// Where the groups of a sequence's keys and values lie, for one key/value head.
struct Groups {
  const KVLayout& layout;
  const int32_t* table;
  int64_t kv_head;
  const char *keys, *values;
  int64_t first, last;  // that the tile sees

  Groups(const Attention& a, const KVLayout& kv_layout, const StepInput& step,
         const AttentionItem& item)
      : layout(kv_layout),
        kv_head(item.head / a.heads_per_kv()),
        keys(static_cast<const char*>(step.keys[a.layer])),
        values(static_cast<const char*>(step.values[a.layer])) {
    const KVKind& kv = step.kv[step.layer_kinds[a.layer]];
    table = kv.tables + item.tile.sequence * kv.table_width;
    const int64_t position = step.positions[item.tile.row];
    first = at(a.window ? std::max<int64_t>(0, position - a.window + 1) : 0);
    last = at(step.positions[item.tile.row + item.tile.rows - 1]);
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

template <class Keys>
void attend_as(const Attention& a, const KVLayout& layout, const StepInput& step,
               const AttentionItem& item, const AttentionItem* next, const char* query,
               int64_t query_stride, char* output, int64_t output_stride, Type output_type,
               AttentionScratch& scratch) {
  const QueryTile& tile = item.tile;
  const int64_t head = item.head, count = item.count, rows = tile.rows * count;
  const int64_t words = layout.key_words(), dims = layout.value_row();
  const int64_t value_bytes = dims * Keys::VALUE_BYTES;
  const int64_t own_stride = padded_row(words * Keys::QUERY_BYTES);
  const auto row_of = [&](int64_t i) { return tile.row + i / count; };
  const auto head_of = [&](int64_t i) { return head + i % count; };

  // Queries in the form in which they meet keys; the place after an odd last dim holds zero.
  for (int64_t i = 0; i < rows; i++) {
    const auto* from = reinterpret_cast<const float*>(query + row_of(i) * query_stride) +
                       head_of(i) * a.key_dim;
    char* to = scratch.query.data() + i * own_stride;
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
    scratch.most[static_cast<size_t>(i)] = -INFINITY;
    scratch.total[static_cast<size_t>(i)] = 0.f;
  }
  float* scores = reinterpret_cast<float*>(scratch.scores.data());
  float* sums = reinterpret_cast<float*>(scratch.output.data());
  std::fill_n(sums, rows * dims, 0.f);

  const int64_t end = step.positions[tile.row + tile.rows - 1] + 1;  // of the last row
  const int64_t size = layout.block_size, per_block = layout.groups();
  const Groups own(a, layout, step, item), after(a, layout, step, next ? *next : item);
  const int64_t last_group = own.last;

  const int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
  const auto tile_begin = [&](int64_t t) { return rows * t / tiles; };
  for (int64_t from = own.first; from <= last_group;) {
    const int64_t to = std::min((from / SPAN + 1) * SPAN, last_group + 1), n = to - from;
    // Pointers run on from keys to values to the keys that come next, here or in the thread's next
    // item: all are fetched ahead.
    const char** groups = scratch.groups.data();
    for (int64_t g = 0; g < n; g++) {
      groups[g] = own.key(from + g);
      groups[n + g] = own.value(from + g);
    }
    for (int64_t g = 0; g < AHEAD; g++)
      groups[2 * n + g] = to + g <= last_group
                              ? own.key(to + g)
                              : after.key(std::min(after.first + to + g - last_group - 1, after.last));
    const int64_t last_start = last_group / per_block * size + last_group % per_block * GROUP;
    const int64_t in_last = size - (per_block - 1) * GROUP;
    Span span{groups + n, n, GROUP, in_last, per_block, from, 0};
    span.end_keys = to == last_group + 1            ? end - last_start
                    : (to - 1) % per_block == per_block - 1 ? in_last
                                                            : GROUP;

    for (int64_t t = 0; t < tiles; t++)
      score_rows<Keys>(static_cast<int>(tile_begin(t + 1) - tile_begin(t)),
                       scratch.query.data() + tile_begin(t) * own_stride, own_stride, groups, n,
                       words, scores + tile_begin(t) * SCORE_STRIDE);
    for (int64_t i = 0; i < rows; i++) {
      const int64_t position = step.positions[row_of(i)];
      const int64_t sees = a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
      const float factor =
          soften(a, span, size, sees, position + 1, scores + i * SCORE_STRIDE,
                 scratch.most[static_cast<size_t>(i)], scratch.total[static_cast<size_t>(i)]);
      if (factor != 1.f)
        for (int64_t d = 0; d < dims; d += LANES)
          store(sums + i * dims + d, load(sums + i * dims + d) * set1(factor));
      if (Keys::SCALED)
        for (int64_t g = 0; g < n; g++) {
          float* weights = scores + i * SCORE_STRIDE + g * GROUP;
          store(weights, load(weights) * scales(span.values[g] + GROUP * value_bytes));
        }
    }
    for (int64_t t = 0; t < tiles; t++) {
      const int part = static_cast<int>(tile_begin(t + 1) - tile_begin(t));
      const float* weights = scores + tile_begin(t) * SCORE_STRIDE;
      float* out = sums + tile_begin(t) * dims;
      int64_t d = 0;
      for (; d + 2 * LANES <= dims; d += 2 * LANES)
        weigh_rows<Keys, 2>(part, weights, span, d * Keys::VALUE_BYTES, value_bytes, out + d, dims);
      if (d < dims)
        weigh_rows<Keys, 1>(part, weights, span, d * Keys::VALUE_BYTES, value_bytes, out + d, dims);
    }
    from = to;
  }

  for (int64_t i = 0; i < rows; i++) {
    float factor = 1.f / scratch.total[static_cast<size_t>(i)];
    if (!a.sinks.empty()) {
      // One more logit in the softmax, with nothing to add to the output.
      const float sink = a.sinks[static_cast<size_t>(head_of(i))];
      const float own = scratch.most[static_cast<size_t>(i)], high = std::max(own, sink);
      const float weight = std::exp(own - high);
      factor = weight / (scratch.total[static_cast<size_t>(i)] * weight + std::exp(sink - high));
    }
    char* row = output + row_of(i) * output_stride;
    const int64_t column = head_of(i) * a.value_dim;
    for (int64_t d = 0; d < a.value_dim; d += LANES) {
      const Vec v = load(sums + i * dims + d) * set1(factor);
      const int here = static_cast<int>(std::min<int64_t>(LANES, a.value_dim - d));
      if (output_type == Type::BF16)
        store_first_bf16(reinterpret_cast<bf16*>(row) + column + d, v, here);
      else
        store_first(reinterpret_cast<float*>(row) + column + d, v, here);
    }
  }
}

}  // namespace

int64_t tile_rows(const Attention& attention) {
  return std::max<int64_t>(1, ROWS_TOGETHER / attention.heads_per_kv());
}

void AttentionScratch::fit(const Attention& a, Type type) {
  const KVLayout layout{GROUP, a.kv_heads, a.key_dim, a.value_dim, type};
  const int64_t rows = tile_rows(a) * a.heads_per_kv();
  const auto grow = [](Memory& memory, int64_t& bytes, int64_t wanted) {
    if (wanted > bytes) memory = Memory(static_cast<size_t>(bytes = wanted));
  };
  grow(query, query_bytes, rows * padded_row(layout.key_words() * 8));
  grow(scores, score_bytes, rows * SCORE_STRIDE * 4);
  grow(output, output_bytes, rows * layout.value_row() * 4);
  most.resize(std::max(most.size(), static_cast<size_t>(rows)));
  total.resize(most.size());
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
