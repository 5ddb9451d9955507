// The largest number of each row, as greedy decoding asks for it.
#pragma once

#include "../machine/pool.h"

namespace penstock {

// Of `rows` rows of `columns` floats, `stride` floats apart: the largest value, and the first place
// it stands at. What is not a number is larger than every number.
void largest(Pool& pool, const float* rows, int64_t count, int64_t columns, int64_t stride,
             float* values, int64_t* places);

}  // namespace penstock
