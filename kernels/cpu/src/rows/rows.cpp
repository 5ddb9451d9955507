#include "rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace penstock {
namespace {

void turn(const Rotary& rotary, int64_t position, float* head) {
  const int64_t half = rotary.dims / 2;
  const float* cosines = rotary.cosines + position * half;
  const float* sines = rotary.sines + position * half;
  if (rotary.interleaved) {
    for (int64_t i = 0; i < half; i++) {
      const float x = head[2 * i], y = head[2 * i + 1];
      head[2 * i] = x * cosines[i] - y * sines[i];
      head[2 * i + 1] = y * cosines[i] + x * sines[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; i += LANES) {
    const int count = static_cast<int>(std::min<int64_t>(LANES, half - i));
    const Vec x = load_first(head + i, count), y = load_first(head + half + i, count);
    const Vec c = load_first(cosines + i, count), s = load_first(sines + i, count);
    store_first(head + i, x * c - y * s, count);
    store_first(head + half + i, y * c + x * s, count);
  }
}

void normalise_heads(const std::vector<Norm>& norms, float* heads, int64_t columns,
                     float* scratch) {
  if (norms.empty()) return;
  size_t next = 0;
  for (int64_t at = 0; at < columns; next++) {
    const Norm& norm = norms[next % norms.size()];
    norm.apply(heads + at, scratch);
    std::memcpy(heads + at, scratch, static_cast<size_t>(norm.columns) * 4);
    at += norm.columns;
  }
}

// Codes of one key or value, `step` bytes apart, and its scale; kv_layout.py has the formula.
void store_int8(const float* x, int64_t count, int8_t* codes, int64_t step, bf16* scale) {
  float most = 0.f;
  bool finite = true;
  for (int64_t d = 0; d < count; d++) {
    const float size = std::fabs(x[d]);
    most = size > most ? size : most;
    finite &= size <= std::numeric_limits<float>::max();
  }
  most /= 127.f;
  uint32_t bits;
  std::memcpy(&bits, &most, 4);
  *scale = finite ? static_cast<bf16>((bits + 0xffffu) >> 16) : bf16{0x7fc0};
  const float factor = finite && most > 0.f ? to_float(*scale) : INFINITY;
  for (int64_t d = 0; d < count; d++)
    codes[d * step] = finite ? static_cast<int8_t>(std::nearbyint(x[d] / factor)) : int8_t{0};
}

void store_key(const KVLayout& layout, char* group, int64_t lane, const float* key) {
  if (layout.type == Type::INT8) {
    auto* scales = reinterpret_cast<bf16*>(group + layout.key_dim * GROUP);
    return store_int8(key, layout.key_dim, reinterpret_cast<int8_t*>(group) + lane, GROUP,
                      scales + lane);
  }
  if (layout.type == Type::FLOAT) {
    auto* words = reinterpret_cast<float*>(group) + lane;
    for (int64_t d = 0; d < layout.key_dim; d++) words[d * GROUP] = key[d];
    return;
  }
  auto* words = reinterpret_cast<LooseWord*>(group) + lane;
  for (int64_t d = 0; d < layout.key_dim; d += LANES) {
    const int count = static_cast<int>(std::min<int64_t>(LANES, layout.key_dim - d));
    alignas(64) bf16 halves[LANES];
    store_bf16(halves, load_first(key + d, count));  // with zeros behind the last dim
    const auto* pairs = reinterpret_cast<const LooseWord*>(halves);
    for (int64_t w = 0; w < (count + 1) / 2; w++) words[(d / 2 + w) * GROUP] = pairs[w];
  }
}

void store_value(const KVLayout& layout, char* group, int64_t lane, const float* value) {
  char* to = group + lane * layout.value_row() * layout.element();
  if (layout.type == Type::INT8) {
    auto* scales = reinterpret_cast<bf16*>(group + layout.value_row() * GROUP);
    return store_int8(value, layout.value_dim, reinterpret_cast<int8_t*>(to), 1, scales + lane);
  }
  for (int64_t d = 0; d < layout.value_dim; d += LANES) {
    const int count = static_cast<int>(std::min<int64_t>(LANES, layout.value_dim - d));
    const Vec v = load_first(value + d, count);  // with zeros behind the last dim
    if (layout.type == Type::FLOAT)
      store(to + d * 4, v);
    else
      store_bf16(reinterpret_cast<bf16*>(to) + d, v);
  }
}

}  // namespace

void Embedding::lookup(int64_t token, float* row) const {
  for (int64_t i = 0; i < columns; i++) {
    const int64_t at = token * columns + i;
    row[i] = type == Type::BF16 ? to_float(static_cast<const bf16*>(table)[at])
                                : static_cast<const float*>(table)[at];
  }
  if (scale != 1.f)
    for (int64_t i = 0; i < columns; i++) row[i] *= scale;
}

void Norm::apply(const float* x, float* y) const {
  float mean = 0.f;
  const auto count = [&](int64_t i) {
    return static_cast<int>(std::min<int64_t>(LANES, columns - i));
  };
  if (centred) {
    Vec sums = set1(0.f);
    for (int64_t i = 0; i < columns; i += LANES) sums = sums + load_first(x + i, count(i));
    mean = sum(sums) / static_cast<float>(columns);
  }
  const Vec shift = set1(mean);
  Vec even = set1(0.f), odd = set1(0.f);
  for (int64_t i = 0; i < columns; i += LANES) {
    Vec v = load_first(x + i, count(i));
    if (centred) v = keep(v - shift, 0, count(i), set1(0.f));
    Vec& squares = i / LANES % 2 ? odd : even;
    squares = fma(v, v, squares);
  }
  const float variance = sum(even + odd) / static_cast<float>(columns);
  const Vec factor = set1(1.f / std::sqrt(variance + epsilon));
  for (int64_t i = 0; i < columns; i += LANES) {
    Vec v = (load_first(x + i, count(i)) - shift) * factor;
    if (!weight.empty()) v = v * load_first(weight.data() + i, count(i));
    if (!bias.empty()) v = v + load_first(bias.data() + i, count(i));
    store_first(y + i, v, count(i));
  }
}

void normalise(const Norm& norm, const NormOutput& output, const float* x, char* row,
               float* scratch) {
  float* y = output.type == Type::FLOAT && !output.add ? reinterpret_cast<float*>(row) : scratch;
  norm.apply(x, y);
  if (y != scratch) return;
  if (output.type == Type::SPLIT) return SplitRow{norm.columns}.fill(scratch, row);
  for (int64_t i = 0; i < norm.columns; i += LANES) {
    const int count = static_cast<int>(std::min<int64_t>(LANES, norm.columns - i));
    const Vec v = load_first(scratch + i, count);
    if (output.type == Type::BF16) {
      store_bf16(reinterpret_cast<bf16*>(row) + i, v);  // zeros behind the columns
    } else {
      float* to = reinterpret_cast<float*>(row) + i;
      store_first(to, load_first(to, count) + v * set1(output.scale), count);
    }
  }
}

void rotate_and_store(const Rotate& op, const KVLayout& layout, const StepInput& step, int64_t row,
                      float* x, float* scratch) {
  float* keys = x + op.heads * op.key_dim;
  const float* values = keys + op.kv_heads * op.key_dim;
  normalise_heads(op.query_norm, x, op.heads * op.key_dim, scratch);
  normalise_heads(op.key_norm, keys, op.kv_heads * op.key_dim, scratch);
  if (op.rotary.cosines)
    for (int64_t h = 0; h < op.heads + op.kv_heads; h++)
      turn(op.rotary, step.positions[row], x + h * op.key_dim);
  const int64_t slot = step.kv[step.layer_kinds[op.layer]].slots[row];
  const int64_t offset = slot % layout.block_size;
  for (int64_t h = 0; h < op.kv_heads; h++) {
    const int64_t at = layout.group(slot / layout.block_size, h, offset / GROUP);
    store_key(layout, static_cast<char*>(step.keys[op.layer]) + at * layout.key_group_bytes(),
              offset % GROUP, keys + h * op.key_dim);
    store_value(layout, static_cast<char*>(step.values[op.layer]) + at * layout.value_group_bytes(),
                offset % GROUP, values + h * op.value_dim);
  }
}

}  // namespace penstock
