// Finds the largest output of a row without computing most outputs.
//
// Greedy decoding asks a model's last layer, its widest, for the largest output alone. A screen is a
// copy of that layer in eight bits. Its products with inputs in eight bits take half the time of
// bf16's, and a quarter of floats'. With w' and x' for what weights w and inputs x became,
//
//   |w x - w' x'| = |w (x - x') + (w - w') x'| <= |w| |x - x'| + |w - w'| |x'|
//
// by the inequality of Cauchy and Schwarz, and all four lengths are known. So each output lies
// between two bounds. One whose upper bound is below another's lower bound is not the largest. The
// few others are computed as in every other step. So the result is the same to the last bit.
//
// Outputs spread over |w| |x| / sqrt(inputs), and the bounds are some hundredths of |w| |x| apart. So
// the more inputs, the more outputs are left. Then inputs become two bytes: |x - x'| is as good as
// nothing, for twice the products. That costs nothing where few rows wait for memory anyway.
//
// Where too many outputs are left all the same, the step gives up, and all outputs are computed.
#pragma once

#include <vector>

#include "../rows/largest.h"
#include "linear.h"
#include "tiles.h"

namespace penstock {

// A panel has the 32 outputs of the matrix's: four headers of 32 words (scale, |w|, |w - w'|, and
// where sums begin), and then steps of 128 bytes, four inputs of each output.
struct Screen {
  // Whether the CPU can, and it is worth its memory.
  static bool fits(const Matrix& matrix);

  // Its memory is of `arena`.
  Screen(Arena& arena, const Matrix& matrix);
  // Panels first .. last - 1, from the weights of the matrix.
  void fill(const Matrix& matrix, int64_t first, int64_t last);
  const char* panel(int64_t index) const { return weights + index * panel_bytes; }
  size_t bytes() const { return static_cast<size_t>(panels * panel_bytes); }

  int64_t outputs, inputs, panels, steps, panel_bytes;
  char* weights;
};

// What a step finds with it, in four stages. Each is divided into items that any thread computes.
class Screening {
 public:
  // Whether it is faster than computing all, if inputs are of that type.
  static bool pays(const Screen& screen, int64_t rows, Type type);

  void begin(const Screen& screen, int64_t rows, int threads);

  // A row of `type` in one or two bytes.
  void round(int64_t row, const char* input, Type type);
  // Panels first .. last - 1 with all rows: notes outputs that may be the largest so far.
  void compare(int64_t first, int64_t last, int thread);
  // Those that still may be, now that all are known.
  void sift(int64_t row);
  // The largest of the part-th of as many parts as there are threads.
  void compute(const Matrix& matrix, const Epilogue& epilogue, const char* input, int64_t row,
               int64_t part);

  // Whether all outputs must be computed; known after sift().
  bool gives_up() const;
  Largest found(int64_t row) const;

 private:
  struct Noted {
    int32_t output;
    float most;  // upper bound
  };
  // Of one row, by one thread.
  struct Notes {
    float least;   // the largest lower bound
    bool are_all;  // or else there would be too many
    std::vector<Noted> outputs;
    // Those of sixteen outputs from `first` on, and before `end`, that have their bits in `lanes`.
    void take(uint32_t lanes, int64_t first, int64_t end, Vec most, Vec at_least);
  };
  struct Rounded {
    float scale, length, error;  // of x', |x'|, |x - x'|
    bool bounded;                // whether the bounds hold for such a row
  };
  template <int ROWS, int PLANES>
  void compare_tile(int64_t panel, int64_t first_row, Fetch fetch, Notes* notes) const;
  template <int PLANES>
  void compare(int64_t first, int64_t last, Notes* notes) const;
  Notes& notes(int64_t row, int64_t thread) {
    return notes_[static_cast<size_t>(thread * rows_ + row)];
  }

  const Screen* screen_ = nullptr;
  int64_t rows_ = 0, threads_ = 0, stride_ = 0, low_at_ = 0, room_ = 0;
  int planes_ = 1;  // bytes of an input
  Memory bytes_;    // [rows]: the high bytes, then the low ones, all with 128 added
  std::vector<Rounded> rounded_;                  // [rows]
  std::vector<Notes> notes_;                      // [threads][rows]
  std::vector<std::vector<int64_t>> contenders_;  // [rows], in order
  std::vector<Largest> largest_;                  // [rows][threads]; place -1: none
};

}  // namespace penstock
