// The part of the C interface that is about rows of logits; see api.cpp.
#include <stdexcept>

#include "../rows/draw.h"
#include "../rows/forbid.h"
#include "../rows/largest.h"
#include "../rows/logprobs.h"
#include "guarded.h"

using namespace penstock;

namespace {

template <class Rows>
void check(const Rows& rows, int64_t count) {
  if (rows.rows < 0 || rows.columns < 1 || rows.columns > INT32_MAX || rows.stride < rows.columns ||
      count < 0 || count > UINT32_MAX)
    throw std::invalid_argument("rows that cannot be");
}

}  // namespace

extern "C" {

int penstock_largest(Pool* pool, const float* rows, int64_t count, int64_t columns, int64_t stride,
                     float* values, int64_t* places, Error* error) {
  return guarded(error, [&] {
    if (count < 0 || count > UINT32_MAX || columns < 1 || stride < columns)
      throw std::invalid_argument("rows that cannot be");
    largest(*pool, rows, count, columns, stride, values, places);
    return 0;
  });
}

int penstock_forbid(Pool* pool, const Masking* masking, Error* error) {
  return guarded(error, [&] {
    check(*masking, masking->count);
    if (masking->words < (masking->columns + 31) / 32)
      throw std::invalid_argument("masks of fewer tokens than there are");
    for (int64_t i = 0; i < masking->count; i++)
      if (masking->which[i] < 0 || masking->which[i] >= masking->rows)
        throw std::invalid_argument("a row that is not there");
    forbid(*pool, *masking);
    return 0;
  });
}

int penstock_draw(Pool* pool, const Logits* logits, const Draws* draws, int64_t* tokens,
                  Error* error) {
  return guarded(error, [&] {
    check(*logits, draws->count);
    for (int64_t i = 0; i < draws->count; i++)
      if (draws->rows[i] < 0 || draws->rows[i] >= logits->rows || !(draws->temperature[i] > 0.f))
        throw std::invalid_argument("a draw from a row that is not there, or without temperature");
    draw(*pool, *logits, *draws, tokens);
    return 0;
  });
}

int penstock_logprobs(Pool* pool, const Logits* logits, const Reports* reports, float* chosen,
                      float* values, int64_t* ids, Error* error) {
  return guarded(error, [&] {
    check(*logits, reports->count);
    if (reports->width < 0 || reports->width > logits->columns)
      throw std::invalid_argument("more of the most likely tokens than there are");
    for (int64_t i = 0; i < reports->count; i++)
      if (reports->rows[i] < 0 || reports->rows[i] >= logits->rows || reports->tokens[i] < 0 ||
          reports->tokens[i] >= logits->columns)
        throw std::invalid_argument("a row or token that is not there");
    logprobs(*pool, *logits, *reports, chosen, values, ids);
    return 0;
  });
}

}  // extern "C"
