// Rows of logits as scores, which sampling and log-probabilities begin with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../machine/elementary.h"

namespace penstock {

struct Logits {
  const float* values;  // [rows][columns], `stride` floats apart
  int64_t rows, columns, stride;
  const float* largest;  // [rows]
};

constexpr float LOWEST = -INFINITY;
constexpr int WEIGHT_BITS = 62;  // a row's sum of weights fits

// A token that is looked at by itself.
struct Candidate {
  float score;
  int32_t id;
  int64_t weight;
};

// Most likely first; of equals the lowest id first.
inline bool before(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// A row's scores: (logit - largest) / temperature, 0 for the most likely.
class Scores {
 public:
  Scores(const float* logits, int64_t columns, float largest, float temperature)
      : columns_(columns),
        logits_(logits),
        largest_(largest),
        temperature_(temperature),
        scale_(std::ldexp(1.f, shift())) {}

  int64_t columns() const { return columns_; }
  // Sixteen of them; -inf behind the last one.
  Vec at(int64_t i) const {
    const int64_t left = columns_ - i;
    Vec x = left >= LANES ? load(logits_ + i)
                          : keep(load_first(logits_ + i, static_cast<int>(left)), 0,
                                 static_cast<int>(left), set1(LOWEST));
    return (x - set1(largest_)) / set1(temperature_);
  }
  float one(int64_t i) const { return (logits_[i] - largest_) / temperature_; }
  // exp(score) in integers, whose sum depends on no order: 2 ** shift() for the most likely.
  int shift() const {
    int bits = 0;
    for (int64_t n = columns_; n; n >>= 1) bits++;
    return WEIGHT_BITS - bits;
  }
  // Below this a weight is none.
  float weightless() const { return -0.69314718f * static_cast<float>(shift()); }
  void weigh(Vec scores, float* weights) const { store(weights, exp(scores) * set1(scale_)); }

 private:
  const int64_t columns_;
  const float* const logits_;
  const float largest_, temperature_, scale_;
};

}  // namespace penstock
