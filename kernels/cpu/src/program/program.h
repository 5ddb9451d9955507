// A model's step as a flat list of operations on buffers, computed by all threads of a pool.
//
// The list is built once; a step then binds what its caller hands over and runs it from begin to
// end. Operations follow one another strictly; within one, items are independent.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "../attention/attention.h"
#include "../linear/screen.h"
#include "../rows/experts.h"
#include "../rows/largest.h"
#include "../machine/pool.h"
#include "../rows/rows.h"

namespace penstock {

// Which rows a buffer has: one for each token of the step, or one for each output asked for.
enum class Rows : int32_t { TOKENS, OUTPUTS };

struct Buffer {
  int64_t columns;
  Type type;
  Rows rows;
  int64_t copies;    // of each row: one for each expert that computes it
  int64_t stride;    // bytes
  int64_t capacity;  // rows that `memory` holds
  Memory memory;
};

constexpr int LOGITS = -1;  // a destination: the caller's logits

struct EmbedOp {
  Embedding embedding;
  int output;
};
struct NormOp {
  Norm norm;
  NormOutput to;
  int input, output;
};
struct LinearOp {
  int matrix;
  Epilogue epilogue;
  std::vector<float> bias;  // what epilogue.bias points at while it runs
  int input, output;        // output may be LOGITS
};
struct RotateOp {
  Rotate rotate;
  int buffer;
};
struct AttendOp {
  Attention attention;
  int input, output;
  size_t cut = 0;  // which AttentionCut, found when it is added
};
// Copies all rows, or those whose logits are wanted, to a buffer of the same or another type.
struct CopyOp {
  int input, output;
};
// Chooses each row's experts. The operations up to the next choice use this one: they gather rows
// by expert, compute two linear layers, and sum by weight.
struct RouteOp {
  Router router;
  int input;
};
struct GatherOp {
  int input, output;
};
struct ExpertsOp {
  int first_matrix;  // of the first expert; the others' follow
  int64_t experts;
  Epilogue epilogue;
  std::vector<float> biases;  // of all experts, one after the other, as in LinearOp
  int input, output;
};
struct CombineOp {
  int input, output;
  bool add;  // to what the output holds, times scale
  float scale;
};
// A stage of finding the largest logits without computing all; see screen.h. Without items in steps
// that want logits.
struct ScreenOp {
  enum class Stage { ROUND, COMPARE, SIFT, COMPUTE } stage;
  size_t linear;  // the operation that makes the logits
};
using Op = std::variant<EmbedOp, NormOp, LinearOp, RotateOp, AttendOp, CopyOp, RouteOp, GatherOp,
                        ExpertsOp, CombineOp, ScreenOp>;
constexpr size_t OP_KINDS = std::variant_size_v<Op>;

class Program final : private Work {
 public:
  Program() = default;

  int add_buffer(int64_t columns, Type type, Rows rows, int64_t copies = 1);
  int add_matrix(int64_t outputs, int64_t inputs, Type type, bool gated,
                 const Coding& coding = Coding(), const ShortExponents* exponents = nullptr);
  // When all matrices are filled: completes those with short exponents.
  void seal();
  // Of all packed weights, without the screen.
  int64_t weight_bytes() const;
  Matrix& matrix(int index);  // throws std::invalid_argument if there is none
  Matrix& fillable(int index);  // or if its weights lie in a file
  // Before there is a matrix: all that come have the weights that write_weights wrote for them. Both
  // throw std::runtime_error where the system refuses.
  void map_weights(const char* path);
  int64_t write_weights(const char* path) const;  // bytes
  // Throws std::invalid_argument if it names what is not there or does not fit.
  void add(Op op);
  // Adds an operation that makes logits, and what finds the largest of them alone; the latter only if
  // it is of use here, which is what it returns.
  bool add_screened(LinearOp op);
  // The part-th of so many parts of its copy of the matrix, which is filled by then.
  void fill_screen(int64_t part, int64_t parts);
  // Times both ways of computing with coded weights, once for each coding; see linear.h.
  void choose_ways();
  void set_cache_type(Type type);

  // Throws std::invalid_argument if the step asks for anything outside its buffers or this model.
  void run(Pool& pool, const StepInput& step) {
    start(pool, step);
    finish(pool);
  }
  // The same in two parts, as Pool has them. Throws before anything is started.
  void start(Pool& pool, const StepInput& step);
  void finish(Pool& pool);

  // Nanoseconds spent in each kind of operation (in the order of Op) since the last call.
  void take_times(int64_t* nanoseconds);

 private:
  struct Scratch {
    LinearScratch linear;
    std::vector<float> row;
    AttentionScratch attention;
    int thread = 0;
  };
  // How an operation is cut into items in this step.
  struct Cut {
    int64_t rows = 0, rows_per_item = 1, panels_per_item = 1, items_per_block = 1;
  };

  void compute(int stage, uint32_t item, int thread) override;
  void nearly_completed(int stage) override;

  void item(const EmbedOp& op, const Cut& cut, int64_t index, Scratch& scratch);
  void item(const NormOp& op, const Cut& cut, int64_t index, Scratch& scratch);
  void item(const LinearOp& op, const Cut& cut, int64_t index, Scratch& scratch);
  void item(const RotateOp& op, const Cut& cut, int64_t index, Scratch& scratch);
  void item(const AttendOp& op, const Cut& cut, int64_t index, Scratch& scratch);
  void item(const CopyOp& op, const Cut& cut, int64_t index, Scratch& scratch);
  void item(const RouteOp& op, const Cut& cut, int64_t index, Scratch& scratch);
  void item(const GatherOp& op, const Cut& cut, int64_t index, Scratch& scratch);
  void item(const ExpertsOp& op, const Cut& cut, int64_t index, Scratch& scratch);
  void item(const CombineOp& op, const Cut& cut, int64_t index, Scratch& scratch);
  void item(const ScreenOp& op, const Cut& cut, int64_t index, Scratch& scratch);

  // Of what screen.h is about.
  uint32_t cut_screen(const ScreenOp& op, int threads, Cut& cut) const;
  void begin_screening(int threads);
  // What has been found, if it was not given up.
  bool join_screened();
  // Of what experts.h is about.
  void check_experts(const Op& op);
  uint32_t cut_experts(const ExpertsOp& op, int threads, Cut& cut) const;
  uint32_t cut(const Op& op, int threads, Cut& cut);
  const Buffer& buffer(int index) const;
  void expect(int index, int64_t columns, Type type) const;
  void check(const StepInput& step) const;
  void fit(const StepInput& step, int threads);
  // The largest logit of each row of an item, while they are in the cache; then of whole rows.
  void find_largest(const Matrix& matrix, const Cut& cut, int64_t index);
  void join_largest(const Cut& cut);
  size_t cut_for(const Attention& attention);
  int64_t rows_of(Rows rows) const { return rows == Rows::TOKENS ? step_.rows : step_.outputs; }
  int64_t rows_of(const Buffer& b) const { return rows_of(b.rows) * b.copies; }
  char* row(int index, int64_t row) const {
    const Buffer& b = buffers_[static_cast<size_t>(index)];
    return b.memory.data() + row * b.stride;
  }
  KVLayout layout(int64_t kv_heads, int64_t key_dim, int64_t value_dim) const {
    return {step_.block_size, kv_heads, key_dim, value_dim, cache_type_};
  }

  std::vector<Buffer> buffers_;
  Arena weights_;  // of all matrices, in the order in which steps read them
  std::vector<Matrix> matrices_;
  std::vector<Op> ops_;
  std::optional<Screen> screen_;
  int screened_ = -1;  // the matrix that it is of
  Type cache_type_ = Type::FLOAT;
  int64_t vocabulary_ = 0, positions_ = INT64_MAX, layers_ = 0, widest_ = 0;
  int64_t logit_columns_ = 0;
  int64_t most_experts_ = 0, most_copies_ = 1;
  int64_t chosen_ = 0;  // by the last RouteOp added

  // Of the step that runs.
  StepInput step_{};
  std::vector<Cut> cuts_;
  std::vector<uint32_t> items_;
  std::vector<Scratch> scratch_;
  std::vector<Largest> largest_;  // [outputs][items_per_block]
  Routing routing_;
  std::deque<AttentionCut> attention_cuts_;
  bool screens_ = false;
  Screening screening_;
  int64_t rests_ = 0;  // steps that do not try again
  int64_t times_[OP_KINDS] = {};
  int64_t started_ = 0;                             // nanoseconds
  std::unique_ptr<std::atomic<int64_t>[]> ended_;  // [ops], of those with items
};

}  // namespace penstock
