#include "largest.h"

#include <algorithm>
#include <cmath>

#include "../machine/vec.h"

namespace penstock {
namespace {

// Places are counted in floats, which hold whole numbers up to 2 ** 24.
constexpr int64_t PART = int64_t{1} << 24;

Largest one_by_one(const float* row, int64_t columns) {
  Largest found{row[0], 0};
  for (int64_t i = 1; i < columns && found.value == found.value; i++)
    if (row[i] > found.value || row[i] != row[i]) found = {row[i], i};
  return found;
}

// `odd` is set if something is no number, or infinitely large.
Largest in_part(const float* row, int64_t columns, bool& odd) {
  const int64_t whole = columns / LANES * LANES;
  Vec most = set1(-INFINITY), at = set1(0.f), flags = set1(0.f);
  for (int64_t i = 0; i < whole; i += LANES) {
    const Vec x = load(row + i);
    at = where_less(most, x, set1(static_cast<float>(i)), at);
    most = max(x, most);
    flags = where_less(x, set1(INFINITY), flags, set1(1.f));
  }
  float lanes[LANES], begins[LANES];
  store(lanes, most);
  store(begins, at);
  odd |= largest(flags) > 0.f;
  Largest found{row[0], 0};
  for (int lane = 0; lane < LANES && whole; lane++) {
    const Largest here{lanes[lane], static_cast<int64_t>(begins[lane]) + lane};
    if (here.value > found.value || (here.value == found.value && here.place < found.place))
      found = here;
  }
  for (int64_t i = whole; i < columns; i++) {
    odd |= !(row[i] < INFINITY);
    if (row[i] > found.value) found = {row[i], i};
  }
  return found;
}

class Rows final : public Work {
 public:
  Rows(const float* rows, int64_t columns, int64_t stride, float* values, int64_t* places)
      : rows_(rows), columns_(columns), stride_(stride), values_(values), places_(places) {}
  void compute(int, uint32_t item, int) override {
    const Largest found = largest_of(rows_ + item * stride_, columns_);
    values_[item] = found.value;
    places_[item] = found.place;
  }

 private:
  const float* rows_;
  int64_t columns_, stride_;
  float* values_;
  int64_t* places_;
};

}  // namespace

Largest largest_of(const float* row, int64_t columns) {
  bool odd = false;
  Largest found = in_part(row, std::min(columns, PART), odd);
  for (int64_t begin = PART; begin < columns; begin += PART) {
    const Largest here = in_part(row + begin, std::min(columns - begin, PART), odd);
    if (here.value > found.value) found = {here.value, begin + here.place};
  }
  return odd ? one_by_one(row, columns) : found;
}

void largest(Pool& pool, const float* rows, int64_t count, int64_t columns, int64_t stride,
             float* values, int64_t* places) {
  Rows work(rows, columns, stride, values, places);
  pool.run(work, {static_cast<uint32_t>(count)});
}

}  // namespace penstock
