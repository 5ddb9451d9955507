// Weights in four or eight bits, with a scale for each output and group of inputs.
//
// A panel of such a matrix is its groups one after the other. A group is 32 scales, 32 offsets if
// the matrix has any, and units of codes. A unit has four inputs or two, for all 32 outputs. With
// the codes' values v the group adds
//
//   scale[n] * sum_k v[n, k] * x[k] + offset[n] * sum_k x[k]
//
// to output n, in pieces that begin at fixed inputs. With AVX2 or better, in a bf16 model, codes
// that are whole numbers multiply activations as split_rows.h has them. Sums are exact then.
// Otherwise codes are decoded to bf16 or floats, in pieces of PIECE_STEPS steps.
#pragma once

#include "integers/split_rows.h"
#include "../machine/vec.h"

namespace penstock {

// Four bits that name one of sixteen values, or are whole numbers from -8; e4m3.
enum class Codes : int32_t { NONE, TABLE4, INT4, INT8, FP8, COUNT };

constexpr bool has_four_bits(Codes codes) { return codes == Codes::TABLE4 || codes == Codes::INT4; }

struct Coding {
  Codes codes = Codes::NONE;
  int64_t group = 0;       // inputs
  bool offsets = false;
  float values[16] = {};   // of four bits
  bool integers = false;   // whether activations are split
};

constexpr int64_t UNIT_BYTES = 64;
constexpr int64_t PIECE_STEPS = 128;

constexpr int64_t unit_inputs(const Coding& coding) {
  return coding.integers || has_four_bits(coding.codes) ? 4 : 2;
}
constexpr int64_t unit_bytes(const Coding& coding) {
  return coding.integers && coding.codes == Codes::INT8 ? 2 * UNIT_BYTES : UNIT_BYTES;
}

#if defined(__AVX512VBMI__)
constexpr bool HAS_BYTE_TABLES = true;
#else
constexpr bool HAS_BYTE_TABLES = false;
#endif

// Products of words read registers of weights of this size; see word_dot.h.
#if defined(__AVX512BW__)
constexpr int64_t WORD_REGISTER_BYTES = 64;
#else
constexpr int64_t WORD_REGISTER_BYTES = 32;
#endif

// A unit of four inputs is cut into slices of half as many outputs as a register has words. A slice
// holds, for each pair of inputs, first one half of its outputs and then the other, in bytes or in
// the four bits of a word.
constexpr int64_t word_place(Codes codes, int64_t input, int64_t output) {
  const int64_t columns = WORD_REGISTER_BYTES / 2, half = columns / 2;
  const int64_t slice = output / columns, number = input / 2 * 2 + output % columns / half;
  const int64_t word = 2 * (output % half) + input % 2;
  if (codes == Codes::INT8) return 8 * (slice * 4 * columns + number * columns + word);
  return 8 * slice * 2 * columns + 16 * word + 4 * number;
}

// Where the code of an input 0 .. unit_inputs - 1 and an output 0 .. 31 lies in a unit: a bit.
constexpr int64_t code_place(const Coding& coding, int64_t input, int64_t output) {
  const int64_t half = output / LANES, lane = output % LANES;
  if (coding.integers && !HAS_BYTE_DOT) return word_place(coding.codes, input, output);
  if (coding.integers)
    return 8 * (4 * lane + input) + half * (coding.codes == Codes::INT8 ? 8 * UNIT_BYTES : 4);
  if (has_four_bits(coding.codes)) return 32 * lane + 16 * (input % 2) + 8 * (input / 2) + 4 * half;
  // Byte tables and the interleaving of their results, or sixteen bytes that widen.
  return 8 * (HAS_BYTE_TABLES ? 16 * (lane / 4) + 8 * half + 2 * (lane % 4) + input
                              : 16 * (2 * input + half) + lane);
}

// How a code is stored: for products of bytes with 128 added. With byte tables as sign and
// magnitude, where -128 is minus zero.
inline uint8_t stored_code(const Coding& coding, uint8_t code) {
  if (coding.codes == Codes::INT8 && coding.integers) return HAS_BYTE_DOT ? code ^ 0x80 : code;
  if (coding.codes != Codes::INT8 || !HAS_BYTE_TABLES || code < 128) return code;
  return static_cast<uint8_t>(0x80 | (256 - code));
}

// e4m3 without its two codes that are no number.
inline float fp8_value(uint8_t code) {
  const uint32_t bits = static_cast<uint32_t>(code & 0x7f) << 20;
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  magnitude *= 0x1p120f;
  return code & 0x80 ? -magnitude : magnitude;
}

// Tables from which units are decoded, as registers want them.
struct CodeTables {
  explicit CodeTables(const Coding& coding);
  alignas(64) float floats[16];
  alignas(64) bf16 halves[32];      // the sixteen values, twice
  alignas(64) uint8_t low[128];     // bytes of the bf16 values of eight-bit magnitudes
  alignas(64) uint8_t high[128];
  uint8_t minus_zero;               // the upper byte of what code 0x80 stands for
  bool fp8;
};

}  // namespace penstock
