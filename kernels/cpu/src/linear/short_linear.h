// Sums of products with weights of short exponents; linear.cpp gives them their epilogue. They are the
// same to the last bit as with weights in full.
#pragma once

#include "linear.h"

namespace penstock {

// Sums of a panel: scratch.sums[row][32].
void sum_short(const Matrix& matrix, const RowBlock& block, int64_t panel, LinearScratch& scratch);

// Of sixteen neighbouring outputs of one row, `first` being a multiple of 16.
Vec sum_few_short(const Matrix& matrix, const char* row, int64_t first);

// The same panel with weights in full, [steps][STEP_BYTES].
void write_full(const Matrix& matrix, int64_t panel, char* full);

}  // namespace penstock
