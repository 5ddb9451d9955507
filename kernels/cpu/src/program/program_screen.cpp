// The stages of a program that find the largest logits without computing all.
#include <stdexcept>

#include "program.h"

namespace penstock {
namespace {

using Stage = ScreenOp::Stage;

constexpr int64_t RESTS = 64;  // steps after one that gave up

}  // namespace

bool Program::add_screened(LinearOp op) {
  const Matrix& m = matrix(op.matrix);
  const Epilogue& e = op.epilogue;
  // A cap makes different sums equal, and of equal ones the first counts. A bias has no bounds here.
  const bool plain = op.bias.empty() && e.activation == Activation::NONE && e.softcap <= 0.f &&
                     e.scale > 1e-6f && e.scale < 1e6f;
  const bool screens = op.output == LOGITS && plain && Screen::fits(m);
  if (screens && screen_) throw std::invalid_argument("a program has one screen");
  const size_t first = ops_.size();
  const int screened = op.matrix;
  add(std::move(op));  // which looks at all of it
  if (!screens) return false;
  screen_.emplace(weights_, m);
  screened_ = screened;
  const auto at = ops_.begin() + static_cast<std::ptrdiff_t>(first);
  const auto stage = [&](Stage s) { return Op(ScreenOp{s, first + 4}); };
  ops_.insert(at, {stage(Stage::ROUND), stage(Stage::COMPARE), stage(Stage::SIFT), stage(Stage::COMPUTE)});
  return true;
}

void Program::fill_screen(int64_t part, int64_t parts) {
  if (!screen_ || weights_.is_file()) return;
  const int64_t panels = screen_->panels;
  screen_->fill(matrix(screened_), panels * part / parts, panels * (part + 1) / parts);
}

void Program::begin_screening(int threads) {
  screens_ = screen_ && step_.largest_only && step_.outputs > 0 && rests_ == 0 &&
             Screening::pays(*screen_, step_.outputs, input_type(matrix(screened_)));
  if (rests_ > 0) rests_--;
  if (screens_) screening_.begin(*screen_, step_.outputs, threads);
}

bool Program::join_screened() {
  if (!screens_) return false;
  if (screening_.gives_up()) {
    rests_ = RESTS;
    return false;
  }
  for (int64_t r = 0; r < step_.outputs; r++) {
    const Largest found = screening_.found(r);
    step_.largest[r] = found.value;
    step_.places[r] = found.place;
  }
  return true;
}

uint32_t Program::cut_screen(const ScreenOp& op, int threads, Cut& cut) const {
  if (!screens_) return 0;
  cut.rows = step_.outputs;
  if (op.stage == Stage::COMPUTE) return static_cast<uint32_t>(cut.rows * threads);
  if (op.stage != Stage::COMPARE) return static_cast<uint32_t>(cut.rows);
  cut.panels_per_item = std::max<int64_t>(1, screen_->panels / (2 * ITEMS_PER_THREAD * threads));
  return static_cast<uint32_t>(divided_up(screen_->panels, cut.panels_per_item));
}

void Program::item(const ScreenOp& op, const Cut& cut, int64_t index, Scratch& scratch) {
  const auto& linear = std::get<LinearOp>(ops_[op.linear]);
  const auto input = [&](int64_t r) { return row(linear.input, r); };
  if (op.stage == Stage::ROUND) {
    screening_.round(index, input(index), buffer(linear.input).type);
  } else if (op.stage == Stage::COMPARE) {
    const int64_t first = index * cut.panels_per_item;
    const int64_t last = std::min(screen_->panels, first + cut.panels_per_item);
    screening_.compare(first, last, scratch.thread);
  } else if (op.stage == Stage::SIFT) {
    screening_.sift(index);
  } else if (!screening_.gives_up()) {
    const int64_t threads = static_cast<int64_t>(items_[op.linear - 1]) / cut.rows;
    const int64_t r = index / threads;
    screening_.compute(matrices_[static_cast<size_t>(linear.matrix)], linear.epilogue, input(r), r,
                       index % threads);
  }
}

}  // namespace penstock
