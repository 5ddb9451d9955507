#include "logprobs.h"

#include <vector>

namespace penstock {
namespace {

// Looks at a row once: the sum of its weights, and its `width` most likely tokens, sorted.
int64_t look(const Scores& scores, int64_t width, std::vector<Candidate>& top) {
  int64_t total = 0;
  float lanes[LANES], weights[LANES];
  top.clear();
  for (int64_t i = 0; i < scores.columns(); i += LANES) {
    const Vec s = scores.at(i);
    if (!all_less(s, set1(scores.weightless()))) {
      scores.weigh(s, weights);
      for (float weight : weights) total += static_cast<int64_t>(weight);
    }
    const bool full = static_cast<int64_t>(top.size()) == width;
    if (!width || (full && all_less(s, set1(top.front().score)))) continue;
    store(lanes, s);
    const int here = static_cast<int>(std::min<int64_t>(LANES, scores.columns() - i));
    for (int lane = 0; lane < here; lane++) {
      const Candidate candidate{lanes[lane], static_cast<int32_t>(i + lane), 0};
      if (static_cast<int64_t>(top.size()) < width) {
        top.push_back(candidate);
      } else if (before(candidate, top.front())) {
        std::pop_heap(top.begin(), top.end(), before);
        top.back() = candidate;
      } else {
        continue;
      }
      std::push_heap(top.begin(), top.end(), before);  // the least likely in front
    }
  }
  std::sort_heap(top.begin(), top.end(), before);
  return total;
}

class Reporting final : public Work {
 public:
  Reporting(const Logits& logits, const Reports& reports, int threads, float* chosen, float* values,
            int64_t* ids)
      : logits_(logits), reports_(reports), chosen_(chosen), values_(values), ids_(ids) {
    top_.resize(static_cast<size_t>(threads));
    for (auto& top : top_) top.reserve(static_cast<size_t>(reports.width));
  }
  void compute(int, uint32_t item, int thread) override {
    const int64_t row = reports_.rows[item], width = reports_.width;
    float* const values = values_ + item * width;
    int64_t* const ids = ids_ + item * width;
    chosen_[item] = 0;
    std::fill(values, values + width, 0.f);
    std::fill(ids, ids + width, 0);
    if (!std::isfinite(logits_.largest[row])) return;
    const Scores scores(logits_.values + row * logits_.stride, logits_.columns,
                        logits_.largest[row], 1.f);
    std::vector<Candidate>& top = top_[static_cast<size_t>(thread)];
    const auto total = static_cast<double>(look(scores, width, top));
    const double log_total = std::log(total) - scores.shift() * std::log(2.0);
    const auto figure = [&](float score) { return static_cast<float>(score - log_total); };
    chosen_[item] = figure(scores.one(reports_.tokens[item]));
    for (size_t i = 0; i < top.size(); i++) {
      values[i] = figure(top[i].score);
      ids[i] = top[i].id;
    }
  }

 private:
  const Logits logits_;
  const Reports reports_;
  float *const chosen_, *const values_;
  int64_t* const ids_;
  std::vector<std::vector<Candidate>> top_;  // of each thread
};

}  // namespace

void logprobs(Pool& pool, const Logits& logits, const Reports& reports, float* chosen, float* values,
              int64_t* ids) {
  Reporting work(logits, reports, pool.threads(), chosen, values, ids);
  pool.run(work, {static_cast<uint32_t>(reports.count)});
}

}  // namespace penstock
