#include "draw.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "random_numbers.h"

namespace penstock {
namespace {

constexpr int64_t BINS = 2048;
constexpr float BINS_A_UNIT = 64.f;  // of a score; the last bin holds all below -32

// What may be drawn: scores of at least `least`, and of those equal to `edge` ids up to `last`.
struct Kept {
  float least = LOWEST, edge = LOWEST;
  int32_t last = INT32_MAX;

  void leave(const Candidate& least_likely) {
    least = edge = least_likely.score;
    last = least_likely.id;
  }
};

// ---- filters

// How many scores, or how much weight, each bin has; the first bin has the largest scores.
class Histogram {
 public:
  static Vec places(Vec scores) {
    return min(scores * set1(-BINS_A_UNIT), set1(static_cast<float>(BINS - 1)));
  }
  template <bool WEIGHED>
  void fill(const Scores& scores) {
    int32_t bins[LANES];
    float weights[LANES];
    for (int64_t i = 0; i < scores.columns(); i += LANES) {
      const Vec s = scores.at(i);
      if (WEIGHED && all_less(s, set1(scores.weightless()))) continue;
      store_ints(bins, places(s));
      if (WEIGHED) scores.weigh(s, weights);
      const int here = static_cast<int>(std::min<int64_t>(LANES, scores.columns() - i));
      for (int lane = 0; lane < here; lane++)
        sums_[bins[lane]] += WEIGHED ? static_cast<int64_t>(weights[lane]) : 1;
    }
  }
  int64_t total() const { return std::accumulate(sums_, sums_ + BINS, int64_t{0}); }
  // The bin in which the running sum reaches the goal, and the sum before it.
  float reached(int64_t goal, int64_t& before_it) const {
    int64_t bin = 0;
    for (before_it = 0; bin < BINS - 1 && before_it + sums_[bin] < goal; bin++)
      before_it += sums_[bin];
    return static_cast<float>(bin);
  }

 private:
  int64_t sums_[BINS] = {};
};

// Those whose scores lie in a bin, or from `least` up; returns how many.
template <class Wanted>
int64_t collect(const Scores& scores, Wanted wanted, Candidate* found) {
  int64_t count = 0;
  float lanes[LANES], weights[LANES];
  for (int64_t i = 0; i < scores.columns(); i += LANES) {
    const Vec s = scores.at(i);
    if (wanted.none(s)) continue;
    store(lanes, s);
    scores.weigh(s, weights);
    const int here = static_cast<int>(std::min<int64_t>(LANES, scores.columns() - i));
    for (int lane = 0; lane < here; lane++)
      if (wanted.has(lanes[lane]))
        found[count++] = {lanes[lane], static_cast<int32_t>(i + lane),
                          static_cast<int64_t>(weights[lane])};
  }
  return count;
}

struct InBin {
  float bin;
  bool none(Vec s) const {
    // Further from its middle than its ends are; what only rounding puts inside has() tells.
    const Vec d = Histogram::places(s) - set1(bin) - set1(0.5f);
    return all_less(set1(0.25f), d * d);
  }
  bool has(float s) const {
    const float place = std::min(s * -BINS_A_UNIT, static_cast<float>(BINS - 1));
    return place >= bin && place < bin + 1.f;
  }
};

struct AtLeast {
  float least;
  bool none(Vec s) const { return all_less(s, set1(least)); }
  bool has(float s) const { return s >= least; }
};

// Keeps the shortest prefix of the candidates, most likely first, whose weight reaches the goal;
// `sum` is what those before them have.
void cut(Candidate* begin, int64_t count, int64_t goal, int64_t sum, Kept& kept) {
  while (count > 32) {
    const int64_t half = count / 2;
    std::nth_element(begin, begin + half, begin + count, before);
    int64_t with = sum;
    for (int64_t i = 0; i < half; i++) with += begin[i].weight;
    if (with >= goal) {
      count = half;
    } else {
      begin += half;
      count -= half;
      sum = with;
    }
  }
  std::sort(begin, begin + count, before);
  kept.leave(begin[0]);
  for (int64_t i = 0; i < count && sum < goal; i++) {
    kept.leave(begin[i]);
    sum += begin[i].weight;
  }
}

int64_t share(int64_t total, double top_p) {
  return static_cast<int64_t>(std::ceil(static_cast<double>(total) * top_p));
}

// `found` has room for a row.
Kept filtered(const Scores& scores, int64_t top_k, double top_p, float log_min_p,
              Candidate* found) {
  Kept kept;
  Histogram histogram;
  int64_t sum = 0;
  if (top_k > 0 && top_k < scores.columns()) {
    histogram.fill<false>(scores);
    const float bin = histogram.reached(top_k, sum);
    const int64_t count = collect(scores, InBin{bin}, found), last = top_k - sum - 1;
    std::nth_element(found, found + last, found + count, before);
    kept.least = found[last].score;
    if (top_p < 1) {
      const int64_t kept_by_k = collect(scores, AtLeast{kept.least}, found);
      int64_t total = 0;
      for (int64_t i = 0; i < kept_by_k; i++) total += found[i].weight;
      cut(found, kept_by_k, share(total, top_p), 0, kept);
    }
  } else if (top_p < 1) {
    histogram.fill<true>(scores);
    const int64_t goal = share(histogram.total(), top_p);
    const float bin = histogram.reached(goal, sum);
    cut(found, collect(scores, InBin{bin}, found), goal, sum, kept);
  }
  kept.least = std::max({kept.least, log_min_p, scores.weightless()});
  return kept;
}

// ---- noise

constexpr float MOST_NOISE = 22.2f;  // of the 31 bits that make it

// Each token's Gumbel noise, a function of the key and the token's id.
class Noise {
 public:
  explicit Noise(const RandomBits& bits)
      : factor_(word(bits.high) | 1), summand_(word(bits.low)) {}

  // 1 - u of the uniform numbers of sixteen tokens, u in 0 .. 1.
  Vec above(int64_t id) const {
    const Words ids = count_from(static_cast<uint32_t>(id) + 1);
    const Words hashed = mix(plus(times(mix(ids), factor_), summand_));
    const Vec whole = to_floats(masked(hashed, 0x7fffffff)) + set1(0.5f);
    return min(whole * set1(0x1p-31f), set1(1.f - 0x1p-24f));
  }
  static Vec gumbel(Vec above) { return -log(-log_below_one(above)); }
  // What its noise is at most: -log(-log(u)) <= -log(1 - u), and 1 - u >= 2 ** exponent.
  static Vec bound(Vec above) { return fma(exponent(above), set1(-0.69314718f), set1(1e-3f)); }

 private:
  static uint32_t word(uint32_t low31) { return low31 | (low31 & 1) << 31; }
  // Wellons' lowbias32.
  static Words mix(Words x) {
    x = times(xor_shifted(x, 16), 0x7feb352du);
    x = times(xor_shifted(x, 15), 0x846ca68bu);
    return xor_shifted(x, 16);
  }
  const uint32_t factor_, summand_;
};

// The kept token whose score and noise have the largest sum, the first of equals. Most tokens cannot
// win whatever their noise is, most others are ruled out by its bound: few logarithms are taken.
int64_t winner(const Scores& scores, const Kept& kept, const Noise& noise) {
  float best = LOWEST, lanes[LANES], sums[LANES];
  int64_t token = 0;
  for (int64_t i = 0; i < scores.columns(); i += LANES) {
    const Vec s = scores.at(i);
    if (all_less(s, set1(std::max(kept.least, best - MOST_NOISE)))) continue;
    const Vec above = noise.above(i);
    if (all_less(s + Noise::bound(above), set1(best))) continue;
    store(lanes, s);
    store(sums, s + Noise::gumbel(above));
    for (int lane = 0; lane < LANES; lane++) {
      const bool is_kept = lanes[lane] > kept.edge || i + lane <= kept.last;
      if (sums[lane] > best && lanes[lane] >= kept.least && is_kept) {
        best = sums[lane];
        token = i + lane;
      }
    }
  }
  return token;
}

class Drawing final : public Work {
 public:
  Drawing(const Logits& logits, const Draws& draws, int threads, int64_t* tokens)
      : logits_(logits), draws_(draws), tokens_(tokens) {
    if (!draws.top_k) return;
    for (int t = 0; t < threads; t++)
      candidates_.emplace_back(new Candidate[static_cast<size_t>(logits.columns)]);
  }
  void compute(int, uint32_t item, int thread) override {
    const int64_t row = draws_.rows[item];
    const float largest = logits_.largest[row];
    tokens_[item] = 0;
    if (!std::isfinite(largest)) return;
    const Scores scores(logits_.values + row * logits_.stride, logits_.columns, largest,
                        draws_.temperature[item]);
    const Noise noise(random_bits(draws_.seeds[item], draws_.choices[item], draws_.indexes[item],
                                  draws_.stream));
    Kept kept;
    if (draws_.top_k)
      kept = filtered(scores, draws_.top_k[item], draws_.top_p[item],
                      draws_.log_min_p ? draws_.log_min_p[item] : LOWEST,
                      candidates_[static_cast<size_t>(thread)].get());
    tokens_[item] = winner(scores, kept, noise);
  }

 private:
  const Logits logits_;
  const Draws draws_;
  int64_t* const tokens_;
  std::vector<std::unique_ptr<Candidate[]>> candidates_;  // of each thread
};

}  // namespace

void draw(Pool& pool, const Logits& logits, const Draws& draws, int64_t* tokens) {
  Drawing work(logits, draws, pool.threads(), tokens);
  pool.run(work, {static_cast<uint32_t>(draws.count)});
}

}  // namespace penstock
