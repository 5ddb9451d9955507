#include "screen.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "integers/split_rows.h"
#include "short_linear.h"
#include "tiles.h"

namespace penstock {
namespace {

constexpr int64_t FEWEST_OUTPUTS = 4096;  // below, the layer is no great part of a step
constexpr int64_t MOST_INPUTS = 1 << 16;  // whose sums of products are words
constexpr int64_t TOGETHER = 4;           // inputs of a step
constexpr int64_t HEADER_BYTES = 4 * PANEL * 4;
// More contenders for each row, as a share of the outputs, cost what the screen saves.
constexpr int64_t OUTPUTS_FOR_A_CONTENDER = 256;
// A thread notes no more for a row, or as many as that: the step will give up.
constexpr int64_t OUTPUTS_FOR_A_NOTE = 32, FEWEST_NOTES = 256;
// With more inputs, one byte of each leaves too many outputs.
constexpr int64_t MOST_INPUTS_OF_A_BYTE = 1536;
// Rows of a register tile: sums of products take two registers of each row and plane.
constexpr int64_t SUMS = 12;
// Lengths between which nothing overflows, and nothing that is flushed to zero counts.
constexpr double LEAST_LENGTH = 1e-15, MOST_LENGTH = 1e15;
constexpr float LARGEST = 127 * 128 + 63;  // that an input becomes: 128 times its high byte, and the low
// For what the bounds themselves are rounded by.
constexpr double UPWARDS = 1 + 1e-5;
// Added to |w - w'|. Times the least length of a row it is more than all that sums may lose because
// numbers below 2 ** -126 are flushed to zero.
constexpr double LOST_BY_FLUSHING = 1e-16;

// How far off a chain of `inputs` rounded sums is at most, over |w| |x|. Ten of the sixteen more are
// between any two outputs that the bounds tell apart: rounding their scaled values cannot make them
// equal. The others are for the bounds.
double chain_error(int64_t inputs) {
  return 1.01 * static_cast<double>(inputs + 16) / static_cast<double>(1 << 24);
}

// A weight of a panel whose steps lie in full.
float weight_of(const Matrix& m, const char* panel, int64_t lane, int64_t input) {
  const bool halves = m.type != Type::FLOAT;
  const char* at = panel + lane * 4 + (halves ? input / 2 : input) * STEP_BYTES;
  if (!halves) return *reinterpret_cast<const LooseFloat*>(at);
  bf16 value;
  std::memcpy(&value, at + input % 2 * 2, 2);
  return to_float(value);
}

// The nearest whole number of -most .. most; 0 for what is not a number.
int nearest(float x, float most) {
  return x == x ? static_cast<int>(std::clamp(std::nearbyintf(x), -most, most)) : 0;
}

// Whole numbers of -127 .. 127 in the place of `values`; returns what one stands for.
float rounded(const float* values, int64_t count, int8_t* numbers) {
  float top = 0;
  for (int64_t i = 0; i < count; i++) top = std::max(top, std::fabs(values[i]));
  const float scale = top / 127.f, factor = top > 0 ? 127.f / top : 0.f;
  for (int64_t i = 0; i < count; i++)
    numbers[i] = static_cast<int8_t>(nearest(values[i] * factor, 127.f));
  return scale;
}

struct Lengths {
  double all = 0, kept = 0, lost = 0;  // of what was rounded, of what it became, of the difference
};

Lengths lengths_of(const float* values, int64_t count, const int8_t* numbers, float scale) {
  Lengths lengths;
  for (int64_t i = 0; i < count; i++) {
    const double value = values[i], kept = double{scale} * numbers[i];
    lengths.all += value * value;
    lengths.kept += kept * kept;
    lengths.lost += (value - kept) * (value - kept);
  }
  return {std::sqrt(lengths.all), std::sqrt(lengths.kept), std::sqrt(lengths.lost)};
}

}  // namespace

// ---- the copy

bool Screen::fits(const Matrix& m) {
  return HAS_BYTE_DOT && !HALVES_APART && !m.is_coded() && !m.gated && m.outputs >= FEWEST_OUTPUTS &&
         m.outputs <= INT32_MAX && m.inputs <= MOST_INPUTS;
}

Screen::Screen(Arena& arena, const Matrix& m)
    : outputs(m.outputs),
      inputs(m.inputs),
      panels(m.panels),
      steps(divided_up(m.inputs, TOGETHER)),
      panel_bytes(HEADER_BYTES + steps * STEP_BYTES),
      weights(arena.take(bytes())) {}

void Screen::fill(const Matrix& matrix, int64_t first, int64_t last) {
  std::vector<float> values(static_cast<size_t>(inputs));
  std::vector<int8_t> numbers(values.size());
  std::vector<char> full(matrix.is_short() ? static_cast<size_t>(matrix.steps * STEP_BYTES) : 0);
  for (int64_t output = first * PANEL; output < std::min(outputs, last * PANEL); output++) {
    const int64_t panel = output / PANEL;
    if (matrix.is_short() && output % PANEL == 0) write_full(matrix, panel, full.data());
    for (int64_t k = 0; k < inputs; k++)
      values[static_cast<size_t>(k)] = weight_of(
          matrix, matrix.is_short() ? full.data() : matrix.panel(panel), output % PANEL, k);
    const float scale = rounded(values.data(), inputs, numbers.data());
    const Lengths lengths = lengths_of(values.data(), inputs, numbers.data(), scale);
    int32_t begin = 0;
    for (const int8_t number : numbers) begin -= 128 * number;
    // Not a number where a weight is none, or too large: its bounds are none, and it is computed.
    const float length = lengths.all < MOST_LENGTH
                             ? static_cast<float>(lengths.all * UPWARDS)
                             : std::numeric_limits<float>::quiet_NaN();
    const float rest = static_cast<float>(lengths.lost * UPWARDS + LOST_BY_FLUSHING);
    const int64_t lane = output % PANEL;
    char* const at = weights + output / PANEL * panel_bytes;
    std::memcpy(at + lane * 4, &scale, 4);
    std::memcpy(at + (PANEL + lane) * 4, &length, 4);
    std::memcpy(at + (2 * PANEL + lane) * 4, &rest, 4);
    std::memcpy(at + (3 * PANEL + lane) * 4, &begin, 4);
    for (int64_t k = 0; k < inputs; k++)
      at[HEADER_BYTES + k / TOGETHER * STEP_BYTES + lane * TOGETHER + k % TOGETHER] =
          static_cast<char>(numbers[static_cast<size_t>(k)]);
  }
}

// ---- a step

bool Screening::pays(const Screen& screen, int64_t rows, Type type) {
  // Two bytes take as many products as two of bf16.
  return type != Type::BF16 || rows <= SUMS / 2 || screen.inputs <= MOST_INPUTS_OF_A_BYTE;
}

void Screening::begin(const Screen& screen, int64_t rows, int threads) {
  screen_ = &screen;
  rows_ = rows;
  threads_ = threads;
  planes_ = rows <= SUMS / 2 || screen.inputs > MOST_INPUTS_OF_A_BYTE ? 2 : 1;
  low_at_ = TOGETHER * screen.steps;
  stride_ = padded_row(2 * low_at_);
  if (rows * stride_ > room_) {
    room_ = 2 * rows * stride_;
    bytes_ = Memory(static_cast<size_t>(room_));
  }
  const auto count = static_cast<size_t>(rows), all = count * static_cast<size_t>(threads);
  if (rounded_.size() < count) rounded_.resize(count);
  if (contenders_.size() < count) contenders_.resize(count);
  if (notes_.size() < all) notes_.resize(all);
  if (largest_.size() < all) largest_.resize(all);
  for (size_t i = 0; i < all; i++) {
    notes_[i].least = -std::numeric_limits<float>::infinity();
    notes_[i].outputs.clear();
    notes_[i].are_all = true;
  }
}

void Screening::round(int64_t row, const char* input, Type type) {
  const int64_t count = screen_->inputs;
  auto* const high = reinterpret_cast<uint8_t*>(bytes_.data() + row * stride_);
  auto* const low = high + low_at_;
  const auto value = [&](int64_t i) {
    return type == Type::BF16 ? to_float(reinterpret_cast<const bf16*>(input)[i])
                              : reinterpret_cast<const float*>(input)[i];
  };
  float top = 0.f;
  for (int64_t i = 0; i < count; i++) top = std::max(top, std::fabs(value(i)));
  const float scale = top / LARGEST, factor = top > 0.f ? LARGEST / top : 0.f;
  double all = 0, kept = 0, lost = 0;
  for (int64_t i = 0; i < count; i++) {
    const float x = value(i);
    const int number = nearest(x * factor, LARGEST);
    const int first = (number + 64) >> 7;
    high[i] = static_cast<uint8_t>(first + 128);
    low[i] = static_cast<uint8_t>(number - 128 * first + 128);
    const double now = double{scale} * (planes_ == 2 ? number : 128 * first);
    all += double{x} * x;
    kept += now * now;
    lost += (x - now) * (x - now);
  }
  const double error = std::sqrt(lost) + chain_error(count) * std::sqrt(all);
  // What is not a number is in no range.
  const bool usual = std::sqrt(all) >= LEAST_LENGTH && std::sqrt(all) <= MOST_LENGTH;
  rounded_[static_cast<size_t>(row)] = {scale, static_cast<float>(std::sqrt(kept) * UPWARDS),
                                        static_cast<float>(error * UPWARDS), usual};
}

#if defined(PENSTOCK_BYTE_DOT)

// Apart from the loop over all outputs, because it is rarely called and would need its registers.
__attribute__((noinline)) void Screening::Notes::take(uint32_t lanes, int64_t first, int64_t end,
                                                      Vec most, Vec at_least) {
  const auto enough = static_cast<size_t>(std::max(FEWEST_NOTES, end / OUTPUTS_FOR_A_NOTE));
  if (outputs.size() >= enough) are_all = false;
  if (!are_all) return;
  float upper[LANES], lower[LANES];
  store(upper, most);
  store(lower, at_least);
  for (int lane = 0; lane < LANES && first + lane < end; lane++) {
    if (!(lanes >> lane & 1)) continue;
    outputs.push_back({static_cast<int32_t>(first + lane), upper[lane]});
    if (lower[lane] > least) least = lower[lane];
  }
}

template <int ROWS, int PLANES>
void Screening::compare_tile(int64_t index, int64_t first_row, Fetch fetch, Notes* notes) const {
  const char* const panel = screen_->panel(index);
  __m512i sum[ROWS][PLANES][2];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int p = 0; p < PLANES; p++)
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++)
        sum[r][p][h] = _mm512_loadu_si512(panel + (3 * PANEL + h * LANES) * 4);
  const char* w = panel + HEADER_BYTES;
  // A pointer to every third row: the two after it are reached by scaled addressing.
  const char *a = bytes_.data() + first_row * stride_, *b = a + 3 * stride_, *c = a + 6 * stride_,
             *d = a + 9 * stride_;
  for (int64_t s = 0; s < screen_->steps; s++, w += STEP_BYTES) {
    prefetch(fetch.from);
    prefetch(fetch.from + fetch.second);
    fetch.from += fetch.stride;
    const __m512i lo = _mm512_loadu_si512(w), hi = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int p = 0; p < PLANES; p++) {
        const char* at = (r < 3 ? a : r < 6 ? b : r < 9 ? c : d) + (r % 3) * stride_ + TOGETHER * s;
        const auto* four = reinterpret_cast<const LooseWord*>(at + (p ? low_at_ : 0));
        const __m512i x = _mm512_set1_epi32(static_cast<int32_t>(*four));
        sum[r][p][0] = _mm512_dpbusd_epi32(sum[r][p][0], x, lo);
        sum[r][p][1] = _mm512_dpbusd_epi32(sum[r][p][1], x, hi);
      }
  }
  // Where their lives in the loop end: otherwise GCC 12 copies every sum in each of its rounds.
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int p = 0; p < PLANES; p++) asm("" : "+v"(sum[r][p][0]), "+v"(sum[r][p][1]));
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const Rounded& row = rounded_[static_cast<size_t>(first_row + r)];
      Vec number = Vec(_mm512_cvtepi32_ps(sum[r][0][h])) * set1(128.f);
      if (PLANES == 2) number = number + Vec(_mm512_cvtepi32_ps(sum[r][PLANES - 1][h]));
      const Vec about = number * (load(panel + h * 64) * set1(row.scale));
      const Vec rest = load(panel + (2 * PANEL + h * LANES) * 4) * set1(row.length);
      const Vec off = fma(load(panel + (PANEL + h * LANES) * 4), set1(row.error), rest);
      const Vec most = about + off;
      Notes& mine = notes[first_row + r];
      // Not less, or not a number.
      const uint32_t may = _mm512_cmp_ps_mask(most, set1(mine.least), _CMP_NLT_UQ);
      if (may) mine.take(may, index * PANEL + h * LANES, screen_->outputs, most, about - off);
    }
}

template <int PLANES>
void Screening::compare(int64_t first, int64_t last, Notes* notes) const {
  constexpr int64_t MOST = SUMS / PLANES;
  const int64_t tiles = divided_up(rows_, MOST);
  const int64_t ahead = rows_ * PLANES <= FEW_PRODUCTS ? AHEAD_FEW_ROWS : AHEAD;
  for (int64_t p = first; p < last; p++)
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = rows_ * t / tiles;
      // Of several tiles the first two fetch half of the next panel each.
      const char* const half = screen_->panel(p + 1) + std::min<int64_t>(t, 1) * screen_->steps * 64;
      const Fetch fetch = tiles == 1 ? Fetch{screen_->panel(p) + HEADER_BYTES + ahead, 64, STEP_BYTES}
                                     : Fetch{half, 0, t < 2 ? 64 : 0};
      switch (rows_ * (t + 1) / tiles - row) {
#define PENSTOCK_ROWS(n) \
  case n: compare_tile<n <= MOST ? n : 1, PLANES>(p, row, fetch, notes); break;
        PENSTOCK_ROWS(1) PENSTOCK_ROWS(2) PENSTOCK_ROWS(3) PENSTOCK_ROWS(4) PENSTOCK_ROWS(5)
        PENSTOCK_ROWS(6) PENSTOCK_ROWS(7) PENSTOCK_ROWS(8) PENSTOCK_ROWS(9) PENSTOCK_ROWS(10)
        PENSTOCK_ROWS(11) PENSTOCK_ROWS(12)
#undef PENSTOCK_ROWS
      }
    }
}

void Screening::compare(int64_t first, int64_t last, int thread) {
  (planes_ == 2 ? compare<2>(first, last, &notes(0, thread)) : compare<1>(first, last, &notes(0, thread)));
}

#else

void Screening::compare(int64_t, int64_t, int) {}

#endif

void Screening::sift(int64_t row) {
  float least = notes(row, 0).least;
  for (int64_t t = 1; t < threads_; t++) least = std::max(least, notes(row, t).least);
  std::vector<int64_t>& contenders = contenders_[static_cast<size_t>(row)];
  contenders.clear();
  for (int64_t t = 0; t < threads_; t++)
    for (const Noted& noted : notes(row, t).outputs)
      if (!(noted.most < least)) contenders.push_back(noted.output);
  std::sort(contenders.begin(), contenders.end());
}

bool Screening::gives_up() const {
  int64_t contenders = 0;
  for (size_t r = 0; r < static_cast<size_t>(rows_); r++) {
    if (!rounded_[r].bounded) return true;
    contenders += static_cast<int64_t>(contenders_[r].size());
  }
  for (size_t i = 0; i < static_cast<size_t>(rows_ * threads_); i++)
    if (!notes_[i].are_all) return true;
  return contenders > rows_ * screen_->outputs / OUTPUTS_FOR_A_CONTENDER;
}

void Screening::compute(const Matrix& matrix, const Epilogue& epilogue, const char* input,
                        int64_t row, int64_t part) {
  const std::vector<int64_t>& contenders = contenders_[static_cast<size_t>(row)];
  const auto count = static_cast<int64_t>(contenders.size());
  Largest found{0.f, -1};
  float outputs[LANES];
  for (int64_t i = count * part / threads_, first = -1; i < count * (part + 1) / threads_; i++) {
    const int64_t output = contenders[static_cast<size_t>(i)];
    if (output / LANES * LANES != first) {
      first = output / LANES * LANES;
      store(outputs, multiply_few(matrix, epilogue, input, first));
    }
    const Largest here{outputs[output % LANES], output};
    if (found.place < 0 || exceeds(here, found)) found = here;
  }
  largest_[static_cast<size_t>(row * threads_ + part)] = found;
}

Largest Screening::found(int64_t row) const {
  Largest best{0.f, -1};
  for (int64_t t = 0; t < threads_; t++) {
    const Largest& here = largest_[static_cast<size_t>(row * threads_ + t)];
    if (here.place >= 0 && (best.place < 0 || exceeds(here, best))) best = here;
  }
  return best;
}

}  // namespace penstock
