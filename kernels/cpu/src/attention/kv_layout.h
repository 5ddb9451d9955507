// Where the keys and values of one layer lie.
//
// A block of tokens is cut into groups of 16 for each key/value head. A group's keys are stored
// transposed, as attention reads them: [key dim][16] floats, or [key dim / 2][16][2] bf16. Its
// values are [16][value dim], the dim padded to a multiple of 16. A block whose size is no multiple
// of 16 ends in a group with unused lanes. In 8 bits keys are [key dim][16] and values [16][value
// dim] bytes. Behind either lie the bf16 scales of the 16 tokens; kv_layout.py has the formula. All
// of a block is one piece of each cache, so that blocks can be copied without knowing any of this.
#pragma once

#include "../linear/linear.h"

namespace penstock {

constexpr int GROUP = LANES;

struct KVLayout {
  int64_t block_size, kv_heads, key_dim, value_dim;
  Type type;

  int64_t element() const { return type == Type::INT8 ? 1 : type == Type::BF16 ? 2 : 4; }
  int64_t scale_bytes() const { return type == Type::INT8 ? GROUP * 2 : 0; }
  int64_t groups() const { return divided_up(block_size, GROUP); }
  // What one key has of: a float, two bf16 or a byte.
  int64_t key_words() const { return type == Type::BF16 ? (key_dim + 1) / 2 : key_dim; }
  int64_t key_word_bytes() const { return type == Type::INT8 ? 1 : 4; }
  int64_t value_row() const { return rounded_up(value_dim, LANES); }
  int64_t key_group_bytes() const {
    return key_words() * GROUP * key_word_bytes() + scale_bytes();
  }
  int64_t value_group_bytes() const {
    return value_row() * GROUP * element() + scale_bytes();
  }
  // The place of a group among all of a layer's.
  int64_t group(int64_t block, int64_t head, int64_t group) const {
    return (block * kv_heads + head) * groups() + group;
  }
};

}  // namespace penstock
