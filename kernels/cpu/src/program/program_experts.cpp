// The operations of mixtures of experts; see program.h.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../linear/coded_linear.h"
#include "program.h"

namespace penstock {
namespace {

// More items than elsewhere: experts have different numbers of rows, so items differ in cost.
constexpr int64_t EXPERT_ITEMS_PER_THREAD = 8;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace

void Program::check_experts(const Op& op) {
  if (const auto* t = std::get_if<RouteOp>(&op)) {
    const Router& o = t->router;
    require(o.chosen > 0 && o.chosen <= o.experts, "a row is computed by some of the experts");
    expect(t->input, o.experts, Type::FLOAT);
    require(buffer(t->input).copies == 1, "each row has one choice of experts");
    most_experts_ = std::max(most_experts_, o.experts);
    chosen_ = o.chosen;
  } else if (const auto* g = std::get_if<GatherOp>(&op)) {
    const Buffer &from = buffer(g->input), &to = buffer(g->output);
    require(chosen_ > 0, "rows are gathered by a choice of experts");
    expect(g->output, from.columns, from.type);
    require(from.rows == to.rows && from.copies == 1 && to.copies == chosen_,
            "each row is gathered once for each of its experts");
  } else if (const auto* x = std::get_if<ExpertsOp>(&op)) {
    const Matrix& first = matrix(x->first_matrix);
    require(x->experts > 0, "no experts");
    require(x->epilogue.type != Type::SPLIT, "a panel is no whole row, which could be split");
    require(first.gated || x->epilogue.activation != Activation::CLAMPED_SWIGLU,
            "a clamped gate is of gated layers");
    require(!x->epilogue.add, "an expert's output is summed by weight");
    require(x->biases.empty() ||
                static_cast<int64_t>(x->biases.size()) == x->experts * first.panels * PANEL,
            "a bias has a value for each packed output");
    expect(x->input, first.inputs, input_type(first));
    expect(x->output, first.outputs, x->epilogue.type);
    for (int64_t e = 0; e < x->experts; e++) {
      const Matrix& m = matrix(x->first_matrix + static_cast<int>(e));
      require(m.inputs == first.inputs && m.outputs == first.outputs && m.gated == first.gated &&
                  input_type(m) == input_type(first),
              "experts are of one shape");
    }
    require(buffer(x->input).rows == buffer(x->output).rows &&
                buffer(x->input).copies == chosen_ && buffer(x->output).copies == chosen_,
            "experts compute gathered rows");
  } else {
    const auto& m = std::get<CombineOp>(op);
    const Buffer &from = buffer(m.input), &to = buffer(m.output);
    expect(m.input, to.columns, Type::FLOAT);
    expect(m.output, to.columns, Type::FLOAT);
    require(from.rows == to.rows && from.copies == chosen_ && to.copies == 1,
            "gathered rows are summed to one for each row");
  }
}

uint32_t Program::cut_experts(const ExpertsOp& op, int threads, Cut& cut) const {
  const Matrix& m = matrices_[static_cast<size_t>(op.first_matrix)];
  cut.rows = rows_of(buffer(op.input));
  // How many experts have any row is known when the round runs. Items of the others are empty.
  const int64_t most = std::min(cut.rows, op.experts);
  const int64_t parts = m.panels * most / (EXPERT_ITEMS_PER_THREAD * threads);
  cut.panels_per_item = std::max(panels_together(m, 1), parts);
  cut.items_per_block = divided_up(m.panels, cut.panels_per_item);
  return static_cast<uint32_t>(most * cut.items_per_block);
}

void Program::item(const RouteOp& op, const Cut&, int64_t, Scratch&) {
  const Buffer& from = buffer(op.input);
  routing_.choose(op.router, row(op.input, 0), from.stride, rows_of(from));
}

void Program::item(const GatherOp& op, const Cut& cut, int64_t index, Scratch&) {
  const auto bytes = static_cast<size_t>(buffer(op.input).stride);
  const int64_t end = std::min(cut.rows, (index + 1) * cut.rows_per_item);
  for (int64_t p = index * cut.rows_per_item; p < end; p++)
    std::memcpy(row(op.output, p), row(op.input, routing_.source(p)), bytes);
}

void Program::item(const ExpertsOp& op, const Cut& cut, int64_t index, Scratch& scratch) {
  const int64_t i = index / cut.items_per_block;
  if (i >= routing_.active()) return;
  const int64_t expert = routing_.expert(i);
  const Matrix& m = matrices_[static_cast<size_t>(op.first_matrix + expert)];
  const int64_t panel = index % cut.items_per_block * cut.panels_per_item;
  const int64_t last = std::min(m.panels, panel + cut.panels_per_item);
  Epilogue epilogue = op.epilogue;
  epilogue.bias = op.biases.empty() ? nullptr : op.biases.data() + expert * m.panels * PANEL;
  const Buffer &from = buffer(op.input), &to = buffer(op.output);
  const int64_t end = routing_.end(expert), together = block_rows(m);
  for (int64_t first = routing_.begin(expert); first < end; first += together) {
    const RowBlock block{row(op.input, first), from.stride, row(op.output, first), to.stride,
                         std::min(together, end - first)};
    multiply(m, epilogue, block, panel, last, scratch.linear);
  }
}

void Program::item(const CombineOp& op, const Cut& cut, int64_t index, Scratch&) {
  const Buffer &from = buffer(op.input), &to = buffer(op.output);
  const int64_t end = std::min(cut.rows, (index + 1) * cut.rows_per_item);
  for (int64_t r = index * cut.rows_per_item; r < end; r++) {
    auto* const out = reinterpret_cast<float*>(row(op.output, r));
    for (int64_t i = 0; i < to.columns; i += LANES) {
      Vec sum = set1(0.f);
      for (int64_t c = r * from.copies; c < (r + 1) * from.copies; c++) {
        const char* part = row(op.input, routing_.place(c));
        sum = fma(set1(routing_.weight(c)), load(reinterpret_cast<const float*>(part) + i), sum);
      }
      sum = sum * set1(op.scale);
      store(out + i, op.add ? load(out + i) + sum : sum);
    }
  }
}

}  // namespace penstock
