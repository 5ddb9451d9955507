// Sums of products with weights in codes; linear.cpp gives them their epilogue.
#pragma once

#include "linear.h"

namespace penstock {

// Sums of `panels` (1 or 2) neighbouring panels: scratch.sums[panel][row][32]. The sums of the
// inputs themselves must be in scratch.input_sums if the matrix has offsets.
void sum_coded(const Matrix& matrix, const RowBlock& block, int64_t first, int64_t panels,
               LinearScratch& scratch);

// Panels that are best summed together.
int64_t panels_together(const Matrix& matrix, int64_t rows);

void sum_inputs(const Matrix& matrix, const RowBlock& block, LinearScratch& scratch);

// Pieces in which the inputs are summed.
int64_t input_pieces(const Matrix& matrix);

// The most rows for which decoding weights in registers is faster than decoding them to the cache
// first, by timing both on the matrix. The results are the same to the last bit.
int most_register_rows(const Matrix& matrix);

}  // namespace penstock
