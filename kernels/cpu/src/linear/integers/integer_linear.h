// Sums of products of whole numbers, for weights in four or eight bits; see split_rows.h.
#pragma once

#include "../linear.h"

namespace penstock {

// Sums of one panel: scratch.sums[row][32].
void sum_integers(const Matrix& matrix, const RowBlock& block, int64_t panel, float* sums);

}  // namespace penstock
