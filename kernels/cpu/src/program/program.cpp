#include "program.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "../linear/coded_linear.h"

namespace penstock {
namespace {

int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

bool same_rows(const Buffer& a, const Buffer& b) { return a.rows == b.rows && a.copies == b.copies; }

}  // namespace

// ---- building

void Program::set_cache_type(Type type) {
  require(type != Type::SPLIT && type != Type::WIDENED, "no such cache");
  cache_type_ = type;
  scratch_.clear();  // which depends on it
}

int Program::add_buffer(int64_t columns, Type type, Rows rows, int64_t copies) {
  require(type != Type::INT8 && type != Type::WIDENED, "no such rows");
  require(columns > 0 && copies > 0, "a buffer needs columns and rows");
  const int64_t stride = padded_row(row_bytes(columns, type));
  buffers_.push_back(Buffer{columns, type, rows, copies, stride, 0, Memory()});
  most_copies_ = std::max(most_copies_, copies);
  widest_ = std::max(widest_, columns);
  return static_cast<int>(buffers_.size()) - 1;
}

int Program::add_matrix(int64_t outputs, int64_t inputs, Type type, bool gated,
                        const Coding& coding, const ShortExponents* exponents) {
  require(outputs > 0 && inputs > 0, "a matrix needs outputs and inputs");
  const bool widened = type == Type::WIDENED && coding.codes == Codes::NONE;
  require(type == Type::FLOAT || type == Type::BF16 || widened, "no such weights");
  scratch_.clear();  // which depends on them
  matrices_.emplace_back(weights_, outputs, inputs, type, gated, coding, exponents);
  return static_cast<int>(matrices_.size()) - 1;
}

Matrix& Program::matrix(int index) {
  require(index >= 0 && index < static_cast<int>(matrices_.size()), "no such matrix");
  return matrices_[static_cast<size_t>(index)];
}

const Buffer& Program::buffer(int index) const {
  require(index >= 0 && index < static_cast<int>(buffers_.size()), "no such buffer");
  return buffers_[static_cast<size_t>(index)];
}

void Program::expect(int index, int64_t columns, Type type) const {
  require(buffer(index).columns == columns && buffer(index).type == type,
          "a buffer's columns or type do not fit the operation");
}

void Program::add(Op op) {
  if (auto* e = std::get_if<EmbedOp>(&op)) {
    expect(e->output, e->embedding.columns, Type::FLOAT);
    require(vocabulary_ == 0, "a program has one embedding");
    vocabulary_ = e->embedding.vocabulary;
  } else if (auto* n = std::get_if<NormOp>(&op)) {
    expect(n->input, n->norm.columns, Type::FLOAT);
    expect(n->output, n->norm.columns, n->to.type);
    require(same_rows(buffer(n->input), buffer(n->output)), "a norm keeps its rows");
    require(!n->to.add || n->to.type == Type::FLOAT, "only floats are added to");
  } else if (auto* l = std::get_if<LinearOp>(&op)) {
    const Matrix& m = matrix(l->matrix);
    expect(l->input, m.inputs, input_type(m));
    require(l->epilogue.activation != Activation::CLAMPED_SWIGLU, "a clamped gate is of experts");
    require(l->epilogue.type != Type::SPLIT, "a panel is no whole row, which could be split");
    require(l->bias.empty() || static_cast<int64_t>(l->bias.size()) == m.panels * PANEL,
            "a bias has a value for each packed output");
    if (l->output == LOGITS) {
      require(buffer(l->input).rows == Rows::OUTPUTS && buffer(l->input).copies == 1, "logits are made of the wanted rows alone");
      require(!l->epilogue.add && l->epilogue.type == Type::FLOAT, "logits are floats");
      logit_columns_ = m.outputs;
    } else {
      expect(l->output, m.outputs, l->epilogue.type);
      require(same_rows(buffer(l->input), buffer(l->output)), "a linear layer keeps its rows");
      require(!l->epilogue.add || l->epilogue.type == Type::FLOAT, "only floats are added to");
    }
  } else if (auto* r = std::get_if<RotateOp>(&op)) {
    const Rotate& o = r->rotate;
    expect(r->buffer, o.input_columns(), Type::FLOAT);
    require(buffer(r->buffer).rows == Rows::TOKENS && buffer(r->buffer).copies == 1, "every token's key is stored");
    require(o.rotary.dims <= o.key_dim && o.rotary.dims % 2 == 0, "too many dims turn");
    for (const auto* norms : {&o.query_norm, &o.key_norm}) {
      const int64_t all = (norms == &o.query_norm ? o.heads : o.kv_heads) * o.key_dim;
      for (const Norm& norm : *norms)
        require(norm.columns == o.key_dim || norm.columns == all, "a norm is of a head or of all");
    }
    if (o.rotary.cosines) positions_ = std::min(positions_, o.rotary.positions);
    layers_ = std::max(layers_, o.layer + 1);
  } else if (auto* a = std::get_if<AttendOp>(&op)) {
    const Attention& o = a->attention;
    require(o.heads > 0 && o.kv_heads > 0 && o.heads % o.kv_heads == 0,
            "key/value heads divide the query heads");
    expect(a->input, (o.heads + o.kv_heads) * o.key_dim + o.kv_heads * o.value_dim, Type::FLOAT);
    expect(a->output, o.heads * o.value_dim, buffer(a->output).type);
    require(buffer(a->output).type != Type::SPLIT, "a head is no whole row, which could be split");
    require(buffer(a->output).rows == Rows::TOKENS && buffer(a->output).copies == 1, "attention keeps its rows");
    require(o.sinks.empty() || static_cast<int64_t>(o.sinks.size()) == o.heads, "a sink per head");
    layers_ = std::max(layers_, o.layer + 1);
    a->cut = cut_for(o);
  } else if (auto* c = std::get_if<CopyOp>(&op)) {
    const Buffer& to = buffer(c->output);
    require(buffer(c->input).columns == to.columns, "a copy has as many columns");
    require(buffer(c->input).type == Type::FLOAT || buffer(c->input).type == to.type,
            "copies are of floats, or of the same type");
    require(buffer(c->input).rows == Rows::TOKENS || to.rows == Rows::OUTPUTS,
            "a copy takes rows away, and adds none");
    require(buffer(c->input).copies == to.copies, "a copy keeps what is there once for each expert");
  } else {
    check_experts(op);
  }
  ops_.push_back(std::move(op));
}

void Program::choose_ways() {
  for (size_t i = 0; i < matrices_.size(); i++) {
    Matrix& m = matrices_[i];
    if (!m.is_coded()) continue;
    const auto same = [&](const Matrix& o) {
      return o.coding.codes == m.coding.codes && o.group_units == m.group_units;
    };
    const auto end = matrices_.begin() + static_cast<std::ptrdiff_t>(i);
    const auto timed = std::find_if(matrices_.begin(), end, same);
    m.register_rows = timed == end ? most_register_rows(m) : timed->register_rows;
  }
}

// ---- a step

void Program::check(const StepInput& s) const {
  require(s.rows > 0 && s.sequences > 0 && s.outputs >= 0 && s.kinds > 0, "an empty step");
  require(s.block_size > 0, "a block holds at least one token");
  require(s.layers >= layers_, "the cache has fewer layers than the program");
  require(s.outputs == 0 || logit_columns_ == 0 || s.logits, "no memory for the logits");
  require(!s.largest_only || s.largest || s.outputs == 0, "no memory for the largest logits");
  require(!s.largest == !s.places, "the largest logits have no places, or no values");
  for (int64_t r = 0; r < s.rows; r++) {
    require(s.tokens[r] >= 0 && (vocabulary_ == 0 || s.tokens[r] < vocabulary_),
            "a token id is outside the vocabulary");
    require(s.positions[r] >= 0 && s.positions[r] < positions_,
            "a position is outside the model's context");
  }
  for (int64_t o = 0; o < s.outputs; o++)
    require(s.output_rows[o] >= 0 && s.output_rows[o] < s.rows, "a wanted row is not in the step");
  require(s.query_starts[0] == 0 && s.query_starts[s.sequences] == s.rows,
          "the sequences do not cover the rows");
  for (int64_t q = 0; q < s.sequences; q++) {
    const int64_t begin = s.query_starts[q], end = s.query_starts[q + 1];
    require(begin < end && end - begin <= s.context_lens[q], "a sequence has no or too many rows");
    for (int64_t r = begin; r < end; r++)
      require(s.positions[r] == s.context_lens[q] - (end - r), "positions do not end a context");
  }
  for (int64_t l = 0; l < layers_; l++)
    require(s.layer_kinds[l] >= 0 && s.layer_kinds[l] < s.kinds, "a layer is of no KV kind");
  for (int64_t k = 0; k < s.kinds; k++) {
    const KVKind& kind = s.kv[k];
    for (int64_t r = 0; r < s.rows; r++)
      require(kind.slots[r] >= 0 && kind.slots[r] < kind.num_blocks * s.block_size,
              "a slot is outside the cache");
    for (int64_t q = 0; q < s.sequences; q++) {
      const int64_t blocks = divided_up(s.context_lens[q], s.block_size);
      require(blocks <= kind.table_width, "a block table is too short for its context");
      // Ids before every window may be anything below; they are never followed.
      for (int64_t b = 0; b < blocks; b++)
        require(kind.tables[q * kind.table_width + b] < kind.num_blocks,
                "a block is outside the cache");
    }
  }
  // Those that a window or a whole context reaches must be blocks.
  for (const Op& op : ops_)
    if (const auto* a = std::get_if<AttendOp>(&op)) {
      const KVKind& kind = s.kv[s.layer_kinds[a->attention.layer]];
      for (int64_t q = 0; q < s.sequences; q++) {
        const int64_t first = s.positions[s.query_starts[q]], window = a->attention.window;
        int64_t b = window ? std::max<int64_t>(0, first - window + 1) / s.block_size : 0;
        for (; b * s.block_size < s.context_lens[q]; b++)
          require(kind.tables[q * kind.table_width + b] >= 0, "a block that is seen has no id");
      }
    }
}

size_t Program::cut_for(const Attention& attention) {
  const auto fits = [&](const AttentionCut& cut) { return cut.fits(attention); };
  const auto found = std::find_if(attention_cuts_.begin(), attention_cuts_.end(), fits);
  const auto index = static_cast<size_t>(found - attention_cuts_.begin());
  if (found == attention_cuts_.end()) attention_cuts_.emplace_back(attention);
  return index;
}

void Program::fit(const StepInput& s, int threads) {
  for (Buffer& b : buffers_) {
    const int64_t rows = (b.rows == Rows::TOKENS ? s.rows : s.outputs) * b.copies;
    if (rows <= b.capacity) continue;
    b.capacity = std::max(rows, 2 * b.capacity);
    b.memory = Memory(static_cast<size_t>(b.capacity * b.stride));
  }
  routing_.fit(most_experts_, s.rows * most_copies_);
  if (scratch_.size() < static_cast<size_t>(threads)) {
    scratch_.resize(static_cast<size_t>(threads));
    for (Scratch& scratch : scratch_) {
      scratch.thread = static_cast<int>(&scratch - scratch_.data());
      for (const Matrix& m : matrices_) scratch.linear.fit(m);
      scratch.row.resize(static_cast<size_t>(widest_ + LANES));
      for (const Op& op : ops_)
        if (const auto* a = std::get_if<AttendOp>(&op))
          scratch.attention.fit(a->attention, cache_type_);
    }
  }
}

uint32_t Program::cut(const Op& op, int threads, Cut& cut) {
  cut = Cut{};
  const auto by_rows = [&](const Buffer& b) {
    cut.rows = rows_of(b);
    cut.rows_per_item = std::max<int64_t>(1, cut.rows / (ITEMS_PER_THREAD * threads));
    return static_cast<uint32_t>(divided_up(cut.rows, cut.rows_per_item));
  };
  if (const auto* l = std::get_if<LinearOp>(&op)) {
    const Matrix& m = matrices_[static_cast<size_t>(l->matrix)];
    cut.rows = rows_of(buffer(l->input));
    // Even blocks, none of them much smaller than another.
    const int64_t blocks = divided_up(cut.rows, block_rows(m));
    cut.rows_per_item = blocks ? divided_up(cut.rows, blocks) : 1;
    cut.panels_per_item = std::max(panels_together(m, cut.rows),
                                   m.panels / (2 * ITEMS_PER_THREAD * threads));
    cut.items_per_block = divided_up(m.panels, cut.panels_per_item);
    if (l->output == LOGITS && step_.largest)
      largest_.resize(static_cast<size_t>(cut.rows * cut.items_per_block));
    return static_cast<uint32_t>(divided_up(cut.rows, cut.rows_per_item) * cut.items_per_block);
  }
  if (const auto* a = std::get_if<AttendOp>(&op))
    return static_cast<uint32_t>(attention_cuts_[a->cut].size());
  if (const auto* x = std::get_if<ExpertsOp>(&op)) return cut_experts(*x, threads, cut);
  if (const auto* e = std::get_if<EmbedOp>(&op)) return by_rows(buffer(e->output));
  if (const auto* n = std::get_if<NormOp>(&op)) return by_rows(buffer(n->input));
  if (const auto* c = std::get_if<CopyOp>(&op)) return by_rows(buffer(c->output));
  if (const auto* g = std::get_if<GatherOp>(&op)) return by_rows(buffer(g->output));
  if (const auto* m = std::get_if<CombineOp>(&op)) return by_rows(buffer(m->output));
  if (const auto* s = std::get_if<ScreenOp>(&op)) return cut_screen(*s, threads, cut);
  if (const auto* t = std::get_if<RouteOp>(&op)) return rows_of(buffer(t->input)) ? 1 : 0;
  return by_rows(buffer(std::get<RotateOp>(op).buffer));
}

void Program::start(Pool& pool, const StepInput& step) {
  check(step);
  fit(step, pool.threads());
  step_ = step;
  begin_screening(pool.threads());
  for (AttentionCut& cut : attention_cuts_) cut.cut(step, pool.threads());
  if (cuts_.size() != ops_.size()) ended_ = std::make_unique<std::atomic<int64_t>[]>(ops_.size());
  cuts_.resize(ops_.size());
  items_.resize(ops_.size());
  for (size_t i = 0; i < ops_.size(); i++) items_[i] = cut(ops_[i], pool.threads(), cuts_[i]);
  started_ = nanoseconds();
  pool.start(*this, items_);
}

void Program::finish(Pool& pool) {
  pool.finish();
  int64_t before = started_;
  for (size_t s = 0; s < ops_.size(); s++) {
    if (!items_[s]) continue;
    const int64_t ended = ended_[s].load(std::memory_order_relaxed);
    times_[ops_[s].index()] += ended - before;
    before = ended;
    const auto* linear = std::get_if<LinearOp>(&ops_[s]);
    if (linear && linear->output == LOGITS && step_.largest && !join_screened())
      join_largest(cuts_[s]);
  }
}

void Program::compute(int stage, uint32_t index, int thread) {
  const auto s = static_cast<size_t>(stage);
  Scratch& scratch = scratch_[static_cast<size_t>(thread)];
  std::visit([&](const auto& op) { item(op, cuts_[s], index, scratch); }, ops_[s]);
}

void Program::nearly_completed(int stage) {
  ended_[static_cast<size_t>(stage)].store(nanoseconds(), std::memory_order_relaxed);
}

void Program::find_largest(const Matrix& matrix, const Cut& cut, int64_t index) {
  const int64_t part = index % cut.items_per_block;
  const int64_t first = index / cut.items_per_block * cut.rows_per_item;
  const int64_t columns = cut.panels_per_item * matrix.panel_outputs();
  const int64_t begin = part * columns, end = std::min(logit_columns_, begin + columns);
  for (int64_t r = first; r < std::min(cut.rows, first + cut.rows_per_item); r++) {
    const Largest found = largest_of(step_.logits + r * logit_columns_ + begin, end - begin);
    largest_[static_cast<size_t>(r * cut.items_per_block + part)] = {found.value, begin + found.place};
  }
}

void Program::join_largest(const Cut& cut) {
  for (int64_t r = 0; r < cut.rows; r++) {
    const Largest* parts = largest_.data() + r * cut.items_per_block;
    Largest found = parts[0];
    for (int64_t i = 1; i < cut.items_per_block; i++)
      if (exceeds(parts[i], found)) found = parts[i];
    step_.largest[r] = found.value;
    step_.places[r] = found.place;
  }
}

void Program::take_times(int64_t* out) {
  std::copy_n(times_, OP_KINDS, out);
  std::fill_n(times_, OP_KINDS, 0);
}

// ---- items

void Program::item(const EmbedOp& op, const Cut& cut, int64_t index, Scratch&) {
  const int64_t end = std::min(cut.rows, (index + 1) * cut.rows_per_item);
  for (int64_t r = index * cut.rows_per_item; r < end; r++)
    op.embedding.lookup(step_.tokens[r], reinterpret_cast<float*>(row(op.output, r)));
}

void Program::item(const NormOp& op, const Cut& cut, int64_t index, Scratch& scratch) {
  const int64_t end = std::min(cut.rows, (index + 1) * cut.rows_per_item);
  for (int64_t r = index * cut.rows_per_item; r < end; r++)
    normalise(op.norm, op.to, reinterpret_cast<const float*>(row(op.input, r)), row(op.output, r),
              scratch.row.data());
}

void Program::item(const LinearOp& op, const Cut& cut, int64_t index, Scratch& scratch) {
  const Matrix& m = matrices_[static_cast<size_t>(op.matrix)];
  const int64_t first = index / cut.items_per_block * cut.rows_per_item;
  const int64_t panel = index % cut.items_per_block * cut.panels_per_item;
  Epilogue epilogue = op.epilogue;
  epilogue.bias = op.bias.empty() ? nullptr : op.bias.data();
  const bool logits = op.output == LOGITS;
  if (logits && screens_ && !screening_.gives_up()) return;
  const int64_t stride = logits ? logit_columns_ * 4 : buffer(op.output).stride;
  char* output = logits ? reinterpret_cast<char*>(step_.logits) : row(op.output, 0);
  const RowBlock block{row(op.input, first), buffer(op.input).stride, output + first * stride,
                       stride, std::min(cut.rows_per_item, cut.rows - first)};
  multiply(m, epilogue, block, panel, std::min(m.panels, panel + cut.panels_per_item),
           scratch.linear);
  if (logits && step_.largest) find_largest(m, cut, index);
}

void Program::item(const RotateOp& op, const Cut& cut, int64_t index, Scratch& scratch) {
  const Rotate& o = op.rotate;
  const int64_t end = std::min(cut.rows, (index + 1) * cut.rows_per_item);
  for (int64_t r = index * cut.rows_per_item; r < end; r++)
    rotate_and_store(o, layout(o.kv_heads, o.key_dim, o.value_dim), step_, r,
                     reinterpret_cast<float*>(row(op.buffer, r)), scratch.row.data());
}

void Program::item(const AttendOp& op, const Cut&, int64_t index, Scratch& scratch) {
  const Attention& o = op.attention;
  const AttentionCut& cut = attention_cuts_[op.cut];
  const AttentionItem* next = index + 1 < cut.size() ? &cut.item(index + 1) : nullptr;
  attend(o, layout(o.kv_heads, o.key_dim, o.value_dim), step_, cut.item(index), next,
         row(op.input, 0), buffer(op.input).stride, row(op.output, 0), buffer(op.output).stride,
         buffer(op.output).type, scratch.attention);
}

void Program::item(const CopyOp& op, const Cut& cut, int64_t index, Scratch&) {
  const Buffer &from = buffer(op.input), &to = buffer(op.output);
  const bool gathers = from.rows != to.rows;
  const int64_t end = std::min(cut.rows, (index + 1) * cut.rows_per_item);
  for (int64_t r = index * cut.rows_per_item; r < end; r++) {
    const char* source = row(op.input, gathers ? step_.output_rows[r] : r);
    if (from.type == to.type) {
      std::memcpy(row(op.output, r), source, static_cast<size_t>(from.stride));
      continue;
    }
    if (to.type == Type::SPLIT) {
      SplitRow{to.columns}.fill(reinterpret_cast<const float*>(source), row(op.output, r));
      continue;
    }
    for (int64_t i = 0; i < from.columns; i += LANES)
      store_bf16(reinterpret_cast<bf16*>(row(op.output, r)) + i,
                 load(reinterpret_cast<const float*>(source) + i));
  }
}

}  // namespace penstock
