// What the ways of multiplying whole numbers have in common; see byte_dot.h and word_dot.h.
//
// Included by integer_linear.cpp alone.
#pragma once

#include <algorithm>

#include "../linear.h"
#include "../tiles.h"

namespace penstock {
namespace {

// A part of the inputs with one scale of activations and one of each output.
struct Part {
  const char* weights;
  int64_t steps;       // of four inputs
  const char* header;  // scales, then offsets if there are any
  const char* input;   // numbers of the first row, or their high bytes
  int64_t scale_at, sum_at, last_sum_at;  // bytes from there
  bool begins_piece, ends_piece, first_piece;  // of the activations
};

// The parts of a panel, one after the other: a group of weights, cut where a piece of activations ends.
class Parts {
 public:
  Parts(const Matrix& matrix, const char* panel, int64_t unit_bytes)
      : split_{matrix.inputs},
        group_(matrix.group_units * 4),
        header_bytes_(matrix.header_bytes),
        unit_bytes_(unit_bytes),
        header_(panel),
        weights_(panel + matrix.header_bytes),
        group_end_(std::min(group_, matrix.inputs)) {}

  bool are_left() const { return at_ < split_.columns; }
  // Of rows that begin at `input`.
  Part next(const char* input) {
    if (at_ == group_end_) {
      header_ = weights_;
      weights_ += header_bytes_;
      group_end_ = std::min(group_end_ + group_, split_.columns);
    }
    const int64_t begin = at_, piece = begin / SPLIT_PIECE;
    at_ = std::min(group_end_, (piece + 1) * SPLIT_PIECE);
    Part part;
    part.weights = weights_;
    part.steps = divided_up(at_ - begin, 4);
    part.header = header_;
    const int64_t from = begin * SPLIT_NUMBER_BYTES;
    part.input = input + from;
    part.scale_at = split_.scales_at() + 4 * piece - from;
    part.sum_at = split_.sums_at() + 4 * (begin / SPLIT_SUM) - from;
    part.last_sum_at = split_.sums_at() + 4 * divided_up(at_, SPLIT_SUM) - from;
    part.begins_piece = begin % SPLIT_PIECE == 0;
    part.ends_piece = at_ % SPLIT_PIECE == 0 || at_ == split_.columns;
    part.first_piece = piece == 0;
    weights_ += part.steps * unit_bytes_;
    return part;
  }

 private:
  const SplitRow split_;
  const int64_t group_, header_bytes_, unit_bytes_;
  const char *header_, *weights_;
  int64_t at_ = 0, group_end_;
};

// What a tile fetches: its own weights, some way ahead, where it reads them in one pass. Of other
// tiles each pass fetches its share of the next panel: one alone would be faster than memory.
struct Ahead {
  int64_t distance;  // bytes; 0: `fetch`
  Fetch fetch;

  Fetch of(const Part& part, int64_t unit_bytes) const {
    // Later parts of a group, which are few, fetch its header once more.
    const int64_t header = std::min<int64_t>(part.weights - part.header, 2 * PANEL * 4);
    for (int64_t i = 0; i < header; i += 64) prefetch(part.header + distance + i);
    return {part.weights + distance, unit_bytes / 2, unit_bytes};
  }
};

// Of a row's numbers before a place, modulo 2 ** 32.
inline int32_t sum_before(const char* at) {
  return static_cast<int32_t>(*reinterpret_cast<const LooseWord*>(at));
}
// The sum of a row's numbers in the part.
inline int32_t sum_of_numbers(const Part& part, const char* row) {
  return static_cast<int32_t>(static_cast<uint32_t>(sum_before(row + part.last_sum_at)) -
                              static_cast<uint32_t>(sum_before(row + part.sum_at)));
}

// `total`, the sums of a piece but for the scale of its activations, with what a part adds to them.
inline Vec with_part(const Part& part, const char* row, bool offsets, int half, Vec scale,
                     Vec products, Vec total) {
  total = fma(products, scale, total);
  if (!offsets) return total;
  const Vec n = set1(static_cast<float>(sum_of_numbers(part, row)));
  return fma(load(part.header + (PANEL + half * LANES) * 4), n, total);
}

// sums [16] += a piece's sums, when its last part has been added.
inline void end_piece(const Part& part, const char* row, Vec total, float* sums) {
  const Vec x = set1(*reinterpret_cast<const LooseFloat*>(row + part.scale_at));
  store(sums, part.first_piece ? total * x : fma(total, x, load(sums)));
}

}  // namespace
}  // namespace penstock
