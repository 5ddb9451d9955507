#include "experts.h"

#include <algorithm>
#include <cmath>

namespace penstock {

void Routing::fit(int64_t experts, int64_t choices) {
  const auto grow = [](auto& v, int64_t count) {
    if (v.size() < static_cast<size_t>(count)) v.resize(static_cast<size_t>(count));
  };
  for (auto* v : {&expert_, &source_, &place_}) grow(*v, choices);
  grow(weight_, choices);
  for (auto* v : {&begin_, &next_}) grow(*v, experts + 1);
  grow(taken_, experts);
  active_.reserve(static_cast<size_t>(experts));
}

void Routing::choose_row(const Router& router, const float* logits, int32_t* experts,
                         float* weights) {
  const auto count = static_cast<int32_t>(router.experts);
  std::fill_n(taken_.begin(), count, char{0});
  for (int64_t j = 0; j < router.chosen; j++) {
    int32_t best = -1;
    // What is not a number is never larger, yet some expert is always chosen.
    for (int32_t e = 0; e < count; e++)
      if (!taken_[static_cast<size_t>(e)] && (best < 0 || logits[e] > logits[best])) best = e;
    taken_[static_cast<size_t>(best)] = 1;
    experts[j] = best;
  }
  std::sort(experts, experts + router.chosen);
  double most = logits[experts[0]], sum = 0;
  for (int64_t j = 1; j < router.chosen; j++) most = std::max<double>(most, logits[experts[j]]);
  if (router.normalised)
    for (int64_t j = 0; j < router.chosen; j++) sum += std::exp(logits[experts[j]] - most);
  else
    for (int32_t e = 0; e < count; e++) sum += std::exp(logits[e] - most);
  for (int64_t j = 0; j < router.chosen; j++)
    weights[j] = static_cast<float>(std::exp(logits[experts[j]] - most) / sum);
}

void Routing::choose(const Router& router, const char* logits, int64_t stride, int64_t rows) {
  std::fill(begin_.begin(), begin_.end(), 0);
  for (int64_t r = 0; r < rows; r++) {
    int32_t* const experts = expert_.data() + r * router.chosen;
    choose_row(router, reinterpret_cast<const float*>(logits + r * stride), experts,
               weight_.data() + r * router.chosen);
    for (int64_t j = 0; j < router.chosen; j++) begin_[static_cast<size_t>(experts[j]) + 1]++;
  }
  active_.clear();
  for (size_t e = 0; e < static_cast<size_t>(router.experts); e++) {
    if (begin_[e + 1]) active_.push_back(static_cast<int32_t>(e));
    begin_[e + 1] += begin_[e];
  }
  std::copy(begin_.begin(), begin_.end(), next_.begin());
  for (int64_t c = 0; c < rows * router.chosen; c++) {
    const auto choice = static_cast<size_t>(c);
    const int32_t at = next_[static_cast<size_t>(expert_[choice])]++;
    place_[choice] = at;
    source_[static_cast<size_t>(at)] = static_cast<int32_t>(c / router.chosen);
  }
}

}  // namespace penstock
