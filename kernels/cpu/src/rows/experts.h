// Mixtures of experts: which experts compute a row, and rows in the order of their experts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock {

// How a row's experts follow from its router's outputs.
struct Router {
  int64_t experts, chosen;  // of `experts`, each row is computed by `chosen`
  bool normalised;          // weights are a softmax over the chosen alone, and not over all
};

// Of one layer in one step. A choice is an expert of a row; a row's choices stand side by side, in
// the order of their experts. A place is where a choice lies when all are sorted by their experts.
class Routing {
 public:
  void fit(int64_t experts, int64_t choices);
  // `logits`: [rows] of router.experts floats, `stride` bytes apart. The largest are chosen; of equal
  // ones those of lower numbers.
  void choose(const Router& router, const char* logits, int64_t stride, int64_t rows);

  int64_t source(int64_t place) const { return source_[static_cast<size_t>(place)]; }  // a row
  int64_t place(int64_t choice) const { return place_[static_cast<size_t>(choice)]; }
  float weight(int64_t choice) const { return weight_[static_cast<size_t>(choice)]; }
  // Experts that compute any row, and the places of each.
  int64_t active() const { return static_cast<int64_t>(active_.size()); }
  int64_t expert(int64_t i) const { return active_[static_cast<size_t>(i)]; }
  int64_t begin(int64_t expert) const { return begin_[static_cast<size_t>(expert)]; }
  int64_t end(int64_t expert) const { return begin_[static_cast<size_t>(expert) + 1]; }

 private:
  void choose_row(const Router& router, const float* logits, int32_t* experts, float* weights);

  std::vector<int32_t> expert_, source_, place_, active_, begin_, next_;
  std::vector<float> weight_;
  std::vector<char> taken_;
};

}  // namespace penstock
