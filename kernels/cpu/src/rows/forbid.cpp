#include "forbid.h"

#include <algorithm>
#include <cmath>

namespace penstock {
namespace {

constexpr int64_t BITS = 32;

class Forbidding final : public Work {
 public:
  explicit Forbidding(const Masking& masking) : masking_(masking) {}
  void compute(int, uint32_t item, int) override {
    const int64_t columns = masking_.columns, words = divided_up(columns, BITS);
    const uint32_t* const mask = masking_.masks + item * masking_.words;
    float* const row = masking_.values + masking_.which[item] * masking_.stride;
    for (int64_t w = 0; w < words; w++) {
      const int64_t begin = w * BITS, end = std::min(columns, begin + BITS);
      if (mask[w] == 0) {
        std::fill(row + begin, row + end, -INFINITY);
      } else if (mask[w] != UINT32_MAX) {
        for (int64_t i = begin; i < end; i++)
          if (!(mask[w] >> (i - begin) & 1)) row[i] = -INFINITY;
      }
    }
  }

 private:
  const Masking masking_;
};

}  // namespace

void forbid(Pool& pool, const Masking& masking) {
  Forbidding work(masking);
  pool.run(work, {static_cast<uint32_t>(masking.count)});
}

}  // namespace penstock
