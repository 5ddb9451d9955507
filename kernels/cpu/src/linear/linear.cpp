#include "linear.h"

#include <algorithm>
#include <stdexcept>

#include "coded_linear.h"
#include "full_tile.h"
#include "short_linear.h"

namespace penstock {
namespace {

constexpr int64_t BLOCK_BYTES = 512 << 10;     // of activations
constexpr int64_t BLOCK_STEPS = 256 / HALVES;  // which stay in the first-level cache

// All rows with HALVES of a panel.
template <class Step>
void sum_halves(const Matrix& matrix, const RowBlock& block, const char* weights, float* sums) {
  const int64_t tiles = divided_up(block.rows, TILE_ROWS);
  if (tiles == 1) {
    const int64_t products = LANES / WIDTH * Step::INPUTS * block.rows;
    const int64_t ahead = products <= FEW_PRODUCTS ? AHEAD_FEW_ROWS : AHEAD;
    full_tile_of<Step, false>(block.rows)(block.input, block.input_stride, weights, matrix.steps, sums,
                                     {weights + ahead, STEP_BYTES / 2, TILE_BYTES});
    return;
  }
  // A piece of them at a time for all tiles, each of which fetches its share of the next.
  const int64_t pieces = std::max<int64_t>(1, (matrix.steps + BLOCK_STEPS / 2) / BLOCK_STEPS);
  const int64_t share = divided_up(TILE_BYTES, tiles);
  for (int64_t p = 0; p < pieces; p++) {
    const int64_t begin = matrix.steps * p / pieces, end = matrix.steps * (p + 1) / pieces;
    const char* next = weights + end * TILE_BYTES;
    for (int64_t t = 0; t < tiles; t++, next += (end - begin) * share) {
      const int64_t row = block.rows * t / tiles, rows = block.rows * (t + 1) / tiles - row;
      (begin ? full_tile_of<Step, true> : full_tile_of<Step, false>)(rows)(
          block.input + row * block.input_stride + begin * 4 * Step::INPUTS, block.input_stride,
          weights + begin * TILE_BYTES, end - begin, sums + row * PANEL, {next, 0, share});
    }
  }
}

template <class Step>
void sum_panel(const Matrix& matrix, const RowBlock& block, const char* panel, float* sums) {
  sum_halves<Step>(matrix, block, panel, sums);
  if (HALVES_APART)
    sum_halves<Step>(matrix, block, panel + matrix.steps * TILE_BYTES, sums + LANES);
}

// One row with sixteen weights of each of a panel's steps.
template <class Step>
Vec sum_few(const char* row, const char* weights, int64_t steps) {
  Vec sum = set1(0.f);
  for (int64_t s = 0; s < steps; s++, weights += STEP_BYTES) {
    prefetch(weights + AHEAD_FEW_ROWS);
    for (int i = 0; i < Step::INPUTS; i++) {
      const auto* x = reinterpret_cast<const LooseFloat*>(row + (s * Step::INPUTS + i) * 4);
      Step::multiply(set1(*x), Step::weights(weights, i), sum);
    }
  }
  return sum;
}

// Sixteen finished outputs, of which the first `count` exist. Behind them the row has room for
// whole vectors of zeros, unless it is the caller's own memory (`count` < 16 then). PLAIN: neither
// scaled nor capped.
template <bool PLAIN>
inline void put(const Epilogue& epilogue, Vec v, char* row, int64_t column, int64_t count) {
  if (!PLAIN) {
    v = v * set1(epilogue.scale);
    if (epilogue.softcap > 0.f)
      v = set1(epilogue.softcap) * tanh(v * set1(1.f / epilogue.softcap));
  }
  const int here = static_cast<int>(std::min<int64_t>(LANES, count));
  if (epilogue.type == Type::BF16)
    return store_first_bf16(reinterpret_cast<bf16*>(row) + column, v, here);
  float* out = reinterpret_cast<float*>(row) + column;
  if (epilogue.add) v = load_first(out, here) + v;
  store_first(out, v, here);
}

template <bool GATED, bool PLAIN>
void finish(const Matrix& matrix, const Epilogue& epilogue, const RowBlock& block, int64_t panel,
            const float* sums) {
  const Vec bias_lo = epilogue.bias ? load(epilogue.bias + panel * PANEL) : set1(0.f);
  const Vec bias_hi = epilogue.bias ? load(epilogue.bias + panel * PANEL + LANES) : set1(0.f);
  const int64_t column = panel * (GATED ? LANES : PANEL), count = matrix.outputs - column;
  for (int64_t r = 0; r < block.rows; r++, sums += PANEL) {
    const Vec lo = load(sums) + bias_lo, hi = load(sums + LANES) + bias_hi;
    char* row = block.output + r * block.output_stride;
    if (GATED) {
      put<PLAIN>(epilogue, gated(epilogue.activation, epilogue.clamp, lo, hi), row, column, count);
      continue;
    }
    put<PLAIN>(epilogue, activate(epilogue.activation, lo), row, column, count);
    if (count > LANES)
      put<PLAIN>(epilogue, activate(epilogue.activation, hi), row, column + LANES, count - LANES);
  }
}

}  // namespace

Matrix::Matrix(Arena& arena, int64_t outputs_, int64_t inputs_, Type type_, bool gated_,
               const Coding& coding_, const ShortExponents* exponents)
    : outputs(outputs_),
      inputs(inputs_),
      panels(gated_ ? divided_up(outputs_, LANES) : divided_up(outputs_, PANEL)),
      type(type_),
      gated(gated_),
      coding(coding_),
      tables(coding_),
      steps(type_ == Type::FLOAT ? inputs_ : (inputs_ + 1) / 2),
      panel_bytes(steps * STEP_BYTES) {
  if (is_coded()) {
    coding.group = std::min(coding.group, inputs);
    const bool whole = coding.codes == Codes::INT4 || coding.codes == Codes::INT8;
    const bool even = coding.group == inputs || coding.group % SPLIT_SUM == 0;
    coding.integers = whole && even && type == Type::BF16 && HAS_INTEGER_DOT;
    const int64_t together = unit_inputs(coding);
    if (coding.group < 1 || (coding.group < inputs && coding.group % together))
      throw std::invalid_argument("the inputs of a group do not fill its units");
    units = divided_up(inputs, together);
    group_units = std::min(units, divided_up(coding.group, together));
    groups = divided_up(units, group_units);
    header_bytes = PANEL * 4 * (coding.offsets ? 2 : 1);
    panel_bytes = groups * header_bytes + units * unit_bytes(coding);
  }
  if (exponents) {
    short_code = std::make_unique<ShortCode>(*exponents, *this);
    panel_bytes = inputs / SHORT_INPUTS * SHORT_BYTES;
  }
  weights = arena.take(static_cast<size_t>(bytes()));
  if (short_code) short_code->check(*this);
}

int64_t Matrix::bytes() const {
  return panels * panel_bytes + (short_code ? short_code->exception_bytes(panels) : 0);
}

void Matrix::fill(const void* source, Type source_type, int64_t first, int64_t count, int part) {
  if (short_code) return short_code->fill(*this, source, source_type, first, count, part);
  const int64_t wide = panel_outputs();
  for (int64_t n = 0; n < count; n++) {
    const int64_t output = first + n, lane = output % wide + part * LANES;
    const int64_t half = HALVES_APART ? steps * TILE_BYTES : STEP_BYTES / 2;
    char* const at = weights + (output / wide) * panel_bytes + lane / LANES * half +
                     lane % LANES * 4;
    for (int64_t k = 0; k < inputs; k++) {
      const int64_t from = n * inputs + k;
      if (type == Type::FLOAT) {
        float value = source_type == Type::BF16 ? to_float(static_cast<const bf16*>(source)[from])
                                                : static_cast<const float*>(source)[from];
        std::memcpy(at + k * TILE_BYTES, &value, 4);
      } else {
        bf16 value = source_type == Type::BF16 ? static_cast<const bf16*>(source)[from]
                                               : to_bf16(static_cast<const float*>(source)[from]);
        std::memcpy(at + k / 2 * TILE_BYTES + k % 2 * 2, &value, 2);
      }
    }
  }
}

void Matrix::fill(const uint8_t* codes, const float* scales, const float* offsets, int64_t first,
                  int64_t count, int part) {
  const int64_t wide = panel_outputs(), together = unit_inputs(coding);
  for (int64_t n = 0; n < count; n++) {
    const int64_t output = first + n, lane = output % wide + part * LANES;
    char* const panel = weights + (output / wide) * panel_bytes;
    for (int64_t g = 0; g < groups; g++) {
      char* const group = panel + g * (header_bytes + group_units * unit_bytes(coding));
      std::memcpy(group + lane * 4, scales + n * groups + g, 4);
      if (coding.offsets) std::memcpy(group + (PANEL + lane) * 4, offsets + n * groups + g, 4);
      const int64_t begin = g * group_units * together;
      const int64_t end = std::min(inputs, begin + group_units * together);
      for (int64_t k = begin; k < end; k++) {
        const int64_t unit = (k - begin) / together, input = (k - begin) % together;
        const int64_t bit = code_place(coding, input, lane);
        char& byte = group[header_bytes + unit * unit_bytes(coding) + bit / 8];
        const uint8_t code = stored_code(coding, codes[n * inputs + k]);
        byte = static_cast<char>(static_cast<uint8_t>(byte) | code << bit % 8);
      }
    }
  }
}

bool fits_bf16(const float* values, int64_t count) {
  constexpr int64_t TOGETHER = 1024;
  const auto* words = reinterpret_cast<const LooseWord*>(values);
  for (; count > 0; count -= TOGETHER, words += TOGETHER) {
    uint32_t bits = 0;
    if (count < TOGETHER)
      for (int64_t i = 0; i < count; i++) bits |= words[i];
    else
      for (int64_t i = 0; i < TOGETHER; i++) bits |= words[i];
    if (bits & 0xffff) return false;
  }
  return true;
}

void LinearScratch::fit(const Matrix& matrix) {
  const auto grow = [](std::vector<float>& v, int64_t count) {
    if (v.size() < static_cast<size_t>(count)) v.resize(static_cast<size_t>(count));
  };
  grow(sums, MOST_BLOCK_ROWS * PANEL);
  if (!matrix.is_coded() && !matrix.is_short()) return;
  if (matrix.is_coded() && matrix.coding.offsets && !matrix.coding.integers)
    grow(input_sums, block_rows(matrix) * input_pieces(matrix));
  if (!piece.data()) piece = Memory(static_cast<size_t>(2 * PIECE_STEPS * STEP_BYTES));
}

int64_t block_rows(const Matrix& matrix) {
  const int64_t step = input_type(matrix) == Type::FLOAT ? 4 : 2;
  const int64_t rows = BLOCK_BYTES / std::max<int64_t>(1, matrix.inputs * step);
  return std::clamp<int64_t>(rows / TILE_ROWS * TILE_ROWS, TILE_ROWS, MOST_BLOCK_ROWS);
}

void multiply(const Matrix& matrix, const Epilogue& epilogue, const RowBlock& block, int64_t first,
              int64_t last, LinearScratch& scratch) {
  const bool plain = epilogue.scale == 1.f && epilogue.softcap <= 0.f;
  const auto ending = matrix.gated ? (plain ? finish<true, true> : finish<true, false>)
                                   : (plain ? finish<false, true> : finish<false, false>);
  float* const sums = scratch.sums.data();
  if (matrix.coding.offsets && !matrix.coding.integers) sum_inputs(matrix, block, scratch);
  const int64_t together = panels_together(matrix, block.rows);
  for (int64_t p = first; p < last; p += together) {
    const int64_t panels = std::min(together, last - p);
    if (matrix.is_coded())
      sum_coded(matrix, block, p, panels, scratch);
    else if (matrix.is_short())
      sum_short(matrix, block, p, scratch);
    else if (matrix.type == Type::WIDENED)
      sum_panel<Widened>(matrix, block, matrix.panel(p), sums);
    else if (matrix.type == Type::BF16)
      sum_panel<Halves>(matrix, block, matrix.panel(p), sums);
    else
      sum_panel<Floats>(matrix, block, matrix.panel(p), sums);
    for (int64_t q = 0; q < panels; q++)
      ending(matrix, epilogue, block, p + q, sums + q * block.rows * PANEL);
  }
}

Vec multiply_few(const Matrix& matrix, const Epilogue& epilogue, const char* row, int64_t first) {
  const char* const weights = matrix.panel(first / PANEL) + first % PANEL * 4;
  const auto sum = matrix.type == Type::WIDENED ? sum_few<Widened>
                   : matrix.type == Type::BF16  ? sum_few<Halves>
                                                : sum_few<Floats>;
  const Vec sums = matrix.is_short() ? sum_few_short(matrix, row, first)
                                     : sum(row, weights, matrix.steps);
  Vec outputs[1];
  put<false>(epilogue, sums, reinterpret_cast<char*>(outputs), 0, LANES);
  return outputs[0];
}

}  // namespace penstock
