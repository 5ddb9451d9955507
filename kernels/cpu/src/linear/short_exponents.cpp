#include "short_exponents.h"

#include <algorithm>
#include <stdexcept>

#include "linear.h"

namespace penstock {
namespace {

// Where a weight lies in its unit.
struct Spot {
  int64_t place;  // among what is unpacked: [half][step][32]
  int64_t half, byte;
};

// `lane` is the output of 32, `input` the input of four.
Spot spot_of(int64_t lane, int64_t input) {
  const int64_t half = lane / LANES, step = input / 2, word = 2 * (lane % LANES) + input % 2;
  return {(2 * half + step) * 32 + word, half, word / 8 * 16 + word % 8 + 8 * step};
}

bf16 value_of(const void* values, Type type, int64_t index) {
  return type == Type::BF16 ? static_cast<const bf16*>(values)[index]
                            : to_bf16(static_cast<const float*>(values)[index]);
}

uint32_t* index_of(const Matrix& matrix) {
  return reinterpret_cast<uint32_t*>(matrix.weights + matrix.panels * matrix.panel_bytes);
}

uint8_t upper_byte(bf16 value) { return static_cast<uint8_t>(value >> 8); }

}  // namespace

void count_exponents(const void* values, Type type, int64_t count, int64_t counts[128]) {
  // Several counts of the same: otherwise each weight waits for the one before it.
  constexpr int64_t TOGETHER = 4;
  uint32_t found[TOGETHER][128];
  constexpr int64_t PART = int64_t{1} << 30;
  for (int64_t begin = 0; begin < count; begin += PART) {
    std::memset(found, 0, sizeof found);
    const int64_t end = std::min(count, begin + PART);
    for (int64_t i = begin; i < end; i++)
      found[i % TOGETHER][upper_byte(value_of(values, type, i)) & 127]++;
    for (const auto& some : found)
      for (int e = 0; e < 128; e++) counts[e] += some[e];
  }
}

ShortCode::ShortCode(const ShortExponents& exponents, const Matrix& matrix)
    : most_exceptions_(exponents.exceptions), table_{} {
  const bool has_words = !matrix.is_coded() && matrix.type != Type::FLOAT;
  const bool in_units =
      matrix.inputs % SHORT_INPUTS == 0 && matrix.inputs / SHORT_INPUTS <= MOST_UNITS;
  const bool counted = most_exceptions_ >= 0 && most_exceptions_ <= UINT32_MAX;
  if (!HAS_SHORT_EXPONENTS || !has_words || !in_units || !counted)
    throw std::invalid_argument("no matrix for short exponents");
  codes_.fill(-1);
  for (int code = 0; code < MOST_EXPONENTS; code++) {
    const uint8_t upper = exponents.exponents[static_cast<size_t>(code)];
    if (upper > 127) throw std::invalid_argument("seven bits of an exponent");
    codes_[upper] = static_cast<int8_t>(code);
    table_[static_cast<size_t>(code)] = upper;
    table_[static_cast<size_t>(code + 8)] = upper | 128;
  }
}

void ShortCode::fill(Matrix& matrix, const void* source, Type source_type, int64_t first,
                     int64_t count, int part) {
  const int64_t wide = matrix.panel_outputs();
  std::vector<uint64_t> found;
  for (int64_t n = 0; n < count; n++) {
    const int64_t output = first + n, panel = output / wide, lane = output % wide + part * LANES;
    char* unit = matrix.weights + panel * matrix.panel_bytes;
    Spot spots[SHORT_INPUTS];
    for (int64_t i = 0; i < SHORT_INPUTS; i++) spots[i] = spot_of(lane, i);
    for (int64_t k = 0; k < matrix.inputs; k++) {
      const Spot& spot = spots[k % SHORT_INPUTS];
      const bf16 value = value_of(source, source_type, n * matrix.inputs + k);
      const uint8_t upper = upper_byte(value);
      const int code = codes_[upper & 127];
      if (code < 0)
        found.push_back(static_cast<uint64_t>(panel) << 32 |
                        exception_of(k / SHORT_INPUTS, spot.place, upper));
      unit[spot.half * 64 + spot.byte] = static_cast<char>(value);
      char& codes = unit[2 * 64 + spot.byte];
      const int four = std::max(code, 0) | upper >> 7 << 3;
      codes = static_cast<char>(codes | four << 4 * spot.half);
      if (k % SHORT_INPUTS == SHORT_INPUTS - 1) unit += SHORT_BYTES;
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  found_.insert(found_.end(), found.begin(), found.end());
}

void ShortCode::seal(Matrix& matrix) {
  if (found_.empty()) return;  // none, or they are there already
  if (static_cast<int64_t>(found_.size()) > most_exceptions_)
    throw std::invalid_argument("more exceptions than there is room for");
  std::sort(found_.begin(), found_.end());
  uint32_t* const index = index_of(matrix);
  uint32_t* const exceptions = index + matrix.panels + 1;
  size_t at = 0;
  for (int64_t p = 0; p <= matrix.panels; p++) {
    index[p] = static_cast<uint32_t>(at);
    for (; at < found_.size() && static_cast<int64_t>(found_[at] >> 32) == p; at++)
      exceptions[at] = static_cast<uint32_t>(found_[at]);
  }
  found_ = {};
}

void ShortCode::check(const Matrix& matrix) const {
  const uint32_t* const index = index_of(matrix);
  for (int64_t p = 0; p <= matrix.panels; p++)
    if (index[p] < (p ? index[p - 1] : 0) || index[p] > most_exceptions_)
      throw std::invalid_argument("exceptions that are not there");
}

const uint32_t* ShortCode::begin(const Matrix& matrix, int64_t panel) const {
  const uint32_t* const index = index_of(matrix);
  return index + matrix.panels + 1 + index[panel];
}

}  // namespace penstock
