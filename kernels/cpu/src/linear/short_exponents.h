// Weights of 16 bits in 12, without loss.
//
// The exponents of a matrix's weights are nearly all the same few. So the upper seven bits of each
// exponent become three: which of eight the matrix has. What is not among them is an exception, and
// is put right where it is decoded. (Zhang et al., 2025, "70% Size, 100% Accuracy: Lossless LLM
// Compression for Efficient GPU Inference via Dynamic-Length Float", code all eight bits by Huffman.
// Codes of one length are decoded with a permutation of bytes.)
//
// A panel is cut into units of two steps, which are four inputs. A weight is two bytes: its sign and the
// upper bits of its exponent, and the rest. A unit has
//   a line with the lower bytes of outputs 0 .. 15, and one of outputs 16 .. 31,
//   a line with codes: byte i has the code of the first line's byte i, and above it the second's.
// A code is the sign above the place of the upper seven bits. Within a line bytes lie so that unpacking
// gives a step's weights in their order: of each sixteen, eight are of the first step.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

namespace penstock {

#if defined(__AVX512VBMI__)
constexpr bool HAS_SHORT_EXPONENTS = true;
#else
constexpr bool HAS_SHORT_EXPONENTS = false;
#endif

enum class Type : int32_t;
struct Matrix;

// Of a unit.
constexpr int64_t SHORT_INPUTS = 4, SHORT_STEPS = 2, SHORT_BYTES = 3 * 64;
constexpr int64_t MOST_UNITS = 1 << 17;  // that an exception can name
constexpr int64_t MOST_EXPONENTS = 8;

struct ShortExponents {
  std::array<uint8_t, MOST_EXPONENTS> exponents;  // the upper seven bits
  int64_t exceptions;                             // weights with other ones
};

// Adds to counts[e] how many values have the upper seven bits of exponent `e`, in 16 bits.
void count_exponents(const void* values, Type type, int64_t count, int64_t counts[128]);

class ShortCode {
 public:
  // Throws std::invalid_argument where the matrix cannot have them.
  ShortCode(const ShortExponents& exponents, const Matrix& matrix);

  // As Matrix::fill, of each output once; by one thread at a time where two outputs lie in one panel.
  void fill(Matrix& matrix, const void* source, Type source_type, int64_t first, int64_t count,
            int part);
  // Puts the exceptions where steps read them, when all weights of the matrix are there. Throws
  // std::invalid_argument if there are more than was said.
  void seal(Matrix& matrix);

  // Throws std::invalid_argument if weights from a file would have exceptions behind their end.
  void check(const Matrix& matrix) const;

  // An index of panels + 1, and the exceptions panel after panel.
  int64_t exception_bytes(int64_t panels) const { return 4 * (panels + 1 + most_exceptions_); }
  // Those of a panel are begin(panel) .. begin(panel + 1) - 1, in the order of their units.
  const uint32_t* begin(const Matrix& matrix, int64_t panel) const;

  // Sixteen upper bytes, by their code.
  const std::array<uint8_t, 16>& table() const { return table_; }

 private:
  int64_t most_exceptions_;
  std::array<uint8_t, 16> table_;
  std::array<int8_t, 128> codes_;  // of upper seven bits; -1: an exception
  std::mutex mutex_;
  std::vector<uint64_t> found_;  // the panel above the exception
};

// An exception: its unit, its place among the 128 weights that it unpacks to, and its upper byte.
constexpr int PLACE_BITS = 7, BYTE_BITS = 8;
static_assert(MOST_UNITS <= int64_t{1} << (32 - PLACE_BITS - BYTE_BITS), "exceptions are words");
constexpr uint32_t exception_of(int64_t unit, int64_t place, uint8_t upper) {
  return static_cast<uint32_t>(unit << (PLACE_BITS + BYTE_BITS) | place << BYTE_BITS | upper);
}
constexpr int64_t unit_of(uint32_t exception) { return exception >> (PLACE_BITS + BYTE_BITS); }
constexpr int64_t place_of(uint32_t exception) { return exception >> BYTE_BITS & 127; }
constexpr uint8_t upper_of(uint32_t exception) { return static_cast<uint8_t>(exception); }

}  // namespace penstock
