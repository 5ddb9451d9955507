// Takes tokens out of rows of logits.
#pragma once

#include <cstdint>

#include "../machine/pool.h"

namespace penstock {

// Makes logits -inf: in `count` rows of `columns` floats, where `masks` [count][words] has no bit. Bit
// i % 32 of word i / 32 is that of token i; there are words enough for all. No row is named twice.
struct Masking {
  float* values;  // of row 0
  int64_t rows, columns, stride;
  int64_t count;
  const int64_t* which;
  const uint32_t* masks;
  int64_t words;
};

void forbid(Pool& pool, const Masking& masking);

}  // namespace penstock
