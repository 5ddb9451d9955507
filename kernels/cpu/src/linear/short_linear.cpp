#include "short_linear.h"

#include <algorithm>

#include "full_tile.h"

namespace penstock {

#if defined(__AVX512VBMI__)

namespace {

// ---- units

// What a unit unpacks to: steps in full, by half of the panel.
struct Steps {
  __m512i of[2][2];
};

// The exceptions of a panel that are still to come.
class Exceptions {
 public:
  Exceptions(const Matrix& matrix, int64_t panel)
      : next_(matrix.short_code->begin(matrix, panel)),
        end_(matrix.short_code->begin(matrix, panel + 1)) {
    find();
  }
  bool are_in(int64_t unit) const { return __builtin_expect(unit == unit_, 0); }

  // In registers: a call would have to save all sums of a tile.
  void put_right(Steps& steps) {
    for (const int64_t unit = unit_; unit_ == unit; next_++, find()) {
      const int64_t place = place_of(*next_);
      const __m512i upper = _mm512_set1_epi8(static_cast<char>(upper_of(*next_)));
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        __m512i& words = steps.of[i / 2][i % 2];
        const __mmask64 byte = uint64_t{place / 32 == i} << (place % 32 * 2 + 1);
        words = _mm512_mask_mov_epi8(words, byte, upper);
      }
    }
  }

 private:
  void find() { unit_ = next_ < end_ ? unit_of(*next_) : -1; }

  const uint32_t *next_, *end_;
  int64_t unit_;
};

__m512i line(const char* unit, int number) { return _mm512_loadu_si512(unit + 64 * number); }

__m512i table_of(const Matrix& matrix) {
  const auto& table = matrix.short_code->table();
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table.data())));
}

// A permutation looks at six bits of each index. Two of them do not matter, as the table is there four
// times.
inline Steps unpacked(const char* unit, __m512i table) {
  const __m512i codes = line(unit, 2);
  const __m512i lower[2] = {line(unit, 0), line(unit, 1)};
  const __m512i upper[2] = {_mm512_permutexvar_epi8(codes, table),
                            _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4), table)};
  Steps steps;
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    steps.of[h][0] = _mm512_unpacklo_epi8(lower[h], upper[h]);
    steps.of[h][1] = _mm512_unpackhi_epi8(lower[h], upper[h]);
  }
  return steps;
}

// Sixteen weights of one of the inputs of half a step, which lies as where weights are in full.
template <class Step>
Vec weights_of(__m512i step, int input) {
  if (Step::INPUTS == 1) return (Vec)step;
  return (Vec)(input ? _mm512_and_si512(step, _mm512_set1_epi32(static_cast<int>(0xffff0000)))
                     : _mm512_slli_epi32(step, 16));
}

// ---- tiles

struct Units {
  const char* first;
  int64_t begin, end;
  __m512i table;
};

// As full_tile, with units begin .. end - 1. A tile that is not ALONE leaves its steps in full for
// those after it, and fetches half of the next piece.
template <class Step, int ROWS, bool RESUME, bool ALONE>
void tile(const char* input, int64_t stride, const Units& units, Exceptions& exceptions, float* sums,
          const char* fetch, char* full) {
  Vec sum[ROWS][2];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++)
      sum[r][h] = RESUME ? load(sums + r * PANEL + h * LANES) : set1(0.f);
  // A pointer to every third row: the two after it are reached by scaled addressing.
  const char *a = input, *b = input + 3 * stride, *c = input + 6 * stride, *d = input + 9 * stride;
  const char* unit = units.first;
  int64_t at = 0;
  for (int64_t u = units.begin; u < units.end; u++, unit += SHORT_BYTES) {
#pragma GCC unroll 3
    for (int i = 0; i < (ALONE ? 3 : 2); i++) prefetch(fetch + 64 * i);
    fetch += ALONE ? SHORT_BYTES : SHORT_BYTES / 2;
    Steps steps = unpacked(unit, units.table);
    if (exceptions.are_in(u)) exceptions.put_right(steps);
#pragma GCC unroll 2
    for (int s = 0; s < SHORT_STEPS; s++) {
      if (!ALONE) {
        _mm512_storeu_si512(full, steps.of[0][s]);
        _mm512_storeu_si512(full + STEP_BYTES / 2, steps.of[1][s]);
        full += STEP_BYTES;
      }
#pragma GCC unroll 2
      for (int i = 0; i < Step::INPUTS; i++, at += 4) {
        const Vec w[2] = {weights_of<Step>(steps.of[0][s], i), weights_of<Step>(steps.of[1][s], i)};
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
          const char* third = r < 3 ? a : r < 6 ? b : r < 9 ? c : d;
          const auto* x = reinterpret_cast<const LooseFloat*>(third + (r % 3) * stride + at);
#pragma GCC unroll 2
          for (int h = 0; h < 2; h++) Step::multiply(set1(*x), w[h], sum[r][h]);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) store(sums + r * PANEL + h * LANES, sum[r][h]);
}

using Tile = void (*)(const char*, int64_t, const Units&, Exceptions&, float*, const char*, char*);

constexpr int FEWEST_OF_SEVERAL = (TILE_ROWS + 1) / 2;  // rows of a tile that is not alone

template <class Step, bool RESUME, bool ALONE>
Tile tile_of(int64_t rows) {
  switch (rows) {
#define PENSTOCK_ROWS(n) \
  case n: return tile<Step, ALONE || n >= FEWEST_OF_SEVERAL ? n : TILE_ROWS, RESUME, ALONE>;
    PENSTOCK_ROWS(1) PENSTOCK_ROWS(2) PENSTOCK_ROWS(3) PENSTOCK_ROWS(4) PENSTOCK_ROWS(5)
    PENSTOCK_ROWS(6) PENSTOCK_ROWS(7) PENSTOCK_ROWS(8) PENSTOCK_ROWS(9) PENSTOCK_ROWS(10)
    PENSTOCK_ROWS(11)
#undef PENSTOCK_ROWS
    default: return tile<Step, TILE_ROWS, RESUME, ALONE>;
  }
}

// ---- panels

template <class Step>
void sum(const Matrix& matrix, const RowBlock& block, int64_t panel, LinearScratch& scratch) {
  constexpr int64_t PIECE_UNITS = PIECE_STEPS / SHORT_STEPS;
  const int64_t all = matrix.inputs / SHORT_INPUTS, tiles = divided_up(block.rows, TILE_ROWS);
  const char* const weights = matrix.panel(panel);
  float* const sums = scratch.sums.data();
  Exceptions exceptions(matrix, panel);
  Units units{weights, 0, all, table_of(matrix)};
  if (tiles == 1) {
    // Three lines have the weights of four, so each of them takes more products than in full.
    const int64_t ahead = block.rows * Step::INPUTS < FEW_PRODUCTS ? AHEAD_FEW_ROWS : AHEAD;
    return tile_of<Step, false, true>(block.rows)(block.input, block.input_stride, units, exceptions,
                                                  sums, weights + ahead, nullptr);
  }
  // A piece at a time for all tiles. The first leaves it in full in the first-level cache.
  char* const full = scratch.piece.data();
  const int64_t pieces = std::max<int64_t>(1, (all + PIECE_UNITS / 2) / PIECE_UNITS);
  for (int64_t p = 0; p < pieces; p++) {
    units.begin = all * p / pieces;
    units.end = all * (p + 1) / pieces;
    units.first = weights + units.begin * SHORT_BYTES;
    const int64_t count = units.end - units.begin;
    const char* const next = units.first + count * SHORT_BYTES;
    const char* const input = block.input + units.begin * SHORT_STEPS * 4 * Step::INPUTS;
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = block.rows * t / tiles, rows = block.rows * (t + 1) / tiles - row;
      const char* const from = input + row * block.input_stride;
      if (t == 0) {
        (p ? tile_of<Step, true, false> : tile_of<Step, false, false>)(rows)(
            from, block.input_stride, units, exceptions, sums, next, full);
        continue;
      }
      const Fetch fetch{next + count * SHORT_BYTES / 2, 0, t == 1 ? SHORT_BYTES / 2 / SHORT_STEPS : 0};
      (p ? full_tile_of<Step, true> : full_tile_of<Step, false>)(rows)(
          from, block.input_stride, full, count * SHORT_STEPS, sums + row * PANEL, fetch);
    }
  }
}

template <class Step>
Vec sum_few(const Matrix& matrix, const char* row, int64_t first) {
  const int half = static_cast<int>(first % PANEL / LANES);
  Exceptions exceptions(matrix, first / PANEL);
  const __m512i table = table_of(matrix);
  const char* unit = matrix.panel(first / PANEL);
  Vec sum = set1(0.f);
  for (int64_t u = 0; u < matrix.inputs / SHORT_INPUTS; u++, unit += SHORT_BYTES) {
    for (int i = 0; i < 3; i++) prefetch(unit + AHEAD_FEW_ROWS + 64 * i);
    Steps steps = unpacked(unit, table);
    if (exceptions.are_in(u)) exceptions.put_right(steps);
#pragma GCC unroll 2
    for (int s = 0; s < SHORT_STEPS; s++) {
      const __m512i step = half ? steps.of[1][s] : steps.of[0][s];
#pragma GCC unroll 2
      for (int i = 0; i < Step::INPUTS; i++, row += 4)
        Step::multiply(set1(*reinterpret_cast<const LooseFloat*>(row)), weights_of<Step>(step, i), sum);
    }
  }
  return sum;
}

}  // namespace

void sum_short(const Matrix& matrix, const RowBlock& block, int64_t panel, LinearScratch& scratch) {
  (matrix.type == Type::WIDENED ? sum<Widened> : sum<Halves>)(matrix, block, panel, scratch);
}

Vec sum_few_short(const Matrix& matrix, const char* row, int64_t first) {
  return (matrix.type == Type::WIDENED ? sum_few<Widened> : sum_few<Halves>)(matrix, row, first);
}

void write_full(const Matrix& matrix, int64_t panel, char* full) {
  Exceptions exceptions(matrix, panel);
  const __m512i table = table_of(matrix);
  const char* unit = matrix.panel(panel);
  for (int64_t u = 0; u < matrix.inputs / SHORT_INPUTS; u++, unit += SHORT_BYTES) {
    Steps steps = unpacked(unit, table);
    if (exceptions.are_in(u)) exceptions.put_right(steps);
    for (int s = 0; s < SHORT_STEPS; s++, full += STEP_BYTES)
      for (int h = 0; h < 2; h++) _mm512_storeu_si512(full + h * STEP_BYTES / 2, steps.of[h][s]);
  }
}

#else

void sum_short(const Matrix&, const RowBlock&, int64_t, LinearScratch&) {}
Vec sum_few_short(const Matrix&, const char*, int64_t) { return set1(0.f); }
void write_full(const Matrix&, int64_t, char*) {}

#endif

}  // namespace penstock
