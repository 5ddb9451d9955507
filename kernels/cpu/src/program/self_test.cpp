// A small model computed by the library and by plain loops: run once, in a process of its own, when
// the library has been built. It finds instructions that the machine lacks, and compilers' errors.
#include <cmath>
#include <cstdio>
#include <exception>

#include "program.h"

using namespace penstock;

namespace {

constexpr int64_t HIDDEN = 48, HEADS = 2, DIM = 24, TOKENS = 21, BLOCK = 16;

float noise(int64_t i) { return static_cast<float>(i * 7919 % 1009) / 504.5f - 1.f; }
bool close(double found, double expected, double tolerance) {
  return std::fabs(found - expected) <= tolerance * (1 + std::fabs(expected));
}

std::vector<float> filled(int64_t count, int64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  // Whole eighths: exact in bf16, too.
  for (size_t i = 0; i < values.size(); i++)
    values[i] = std::round(8 * noise(seed + static_cast<int64_t>(i))) / 8;
  return values;
}

// One head's output at one position by the textbook, from rows of query, keys and values.
std::vector<double> attended(const std::vector<double>& rows, int64_t position, int64_t head) {
  const int64_t width = 3 * HEADS * DIM;
  std::vector<double> weights, out(static_cast<size_t>(DIM));
  double total = 0;
  for (int64_t j = 0; j <= position; j++) {
    double score = 0;
    for (int64_t d = 0; d < DIM; d++)
      score += rows[static_cast<size_t>(position * width + head * DIM + d)] *
               rows[static_cast<size_t>(j * width + (HEADS + head) * DIM + d)];
    weights.push_back(std::exp(0.2 * score));
    total += weights.back();
  }
  for (int64_t j = 0; j <= position; j++)
    for (int64_t d = 0; d < DIM; d++)
      out[static_cast<size_t>(d)] += weights[static_cast<size_t>(j)] / total *
          rows[static_cast<size_t>(j * width + (2 * HEADS + head) * DIM + d)];
  return out;
}

bool layer_is_right(Type type) {
  const int64_t width = 3 * HEADS * DIM;
  const auto table = filled(TOKENS * HIDDEN, 1), weights = filled(width * HIDDEN, 2);
  const auto head = filled(HIDDEN * HEADS * DIM, 3);
  Program program;
  program.set_cache_type(type);
  const Type multiplied = activation_type(type);
  const int x = program.add_buffer(HIDDEN, Type::FLOAT, Rows::TOKENS);
  const int normed = program.add_buffer(HIDDEN, multiplied, Rows::TOKENS);
  const int qkv = program.add_buffer(width, Type::FLOAT, Rows::TOKENS);
  const int mixed = program.add_buffer(HEADS * DIM, multiplied, Rows::TOKENS);
  const int wanted = program.add_buffer(HEADS * DIM, multiplied, Rows::OUTPUTS);
  const int project = program.add_matrix(width, HIDDEN, type, false);
  const int out = program.add_matrix(HIDDEN, HEADS * DIM, type, false);
  program.matrix(project).fill(weights.data(), Type::FLOAT, 0, width, 0);
  program.matrix(out).fill(head.data(), Type::FLOAT, 0, HIDDEN, 0);
  program.add(EmbedOp{{table.data(), Type::FLOAT, TOKENS, HIDDEN, 1.f}, x});
  program.add(NormOp{{HIDDEN, false, 1e-5f, {}, {}}, {multiplied, false, 1.f}, x, normed});
  Epilogue to_floats;
  to_floats.scale = 0.125f;
  program.add(LinearOp{project, to_floats, {}, normed, qkv});
  program.add(RotateOp{{HEADS, HEADS, DIM, DIM, 0, {}, {}, {}}, qkv});
  Attention attention{HEADS, HEADS, DIM, DIM, 0.2f, 0, 0.f, {}, 0};
  program.add(AttendOp{attention, qkv, mixed});
  program.add(CopyOp{mixed, wanted});
  program.add(LinearOp{out, Epilogue{}, {}, wanted, LOGITS});

  const KVLayout layout{BLOCK, HEADS, DIM, DIM, type};
  Memory keys(static_cast<size_t>(2 * HEADS * layout.key_group_bytes()));
  Memory values(static_cast<size_t>(2 * HEADS * layout.value_group_bytes()));
  std::vector<int64_t> numbers, slots;
  for (int64_t t = 0; t < TOKENS; t++) {
    numbers.push_back(t);
    slots.push_back((1 - t / BLOCK) * BLOCK + t % BLOCK);
  }
  const int32_t tables[] = {1, 0}, starts[] = {0, TOKENS}, context[] = {TOKENS}, kinds[] = {0};
  const int64_t last[] = {TOKENS - 1};
  void *key_cache[] = {keys.data()}, *value_cache[] = {values.data()};
  const KVKind kind{slots.data(), tables, 2, 2};
  std::vector<float> logits(static_cast<size_t>(HIDDEN));
  const StepInput step{TOKENS, 1, 1, 1, 1, BLOCK, numbers.data(), numbers.data(), starts, context,
                       last, &kind, kinds, key_cache, value_cache, logits.data(), nullptr,
                       nullptr};
  Pool pool(2, 50);
  program.run(pool, step);

  std::vector<double> rows(static_cast<size_t>(TOKENS * width));
  for (int64_t t = 0; t < TOKENS; t++) {
    double squares = 0;
    const auto at = [&](int64_t k) { return double{table[static_cast<size_t>(t * HIDDEN + k)]}; };
    for (int64_t k = 0; k < HIDDEN; k++) squares += at(k) * at(k);
    for (int64_t n = 0; n < width; n++)
      for (int64_t k = 0; k < HIDDEN; k++)
        rows[static_cast<size_t>(t * width + n)] +=
            0.125 * at(k) / std::sqrt(squares / HIDDEN + 1e-5) *
            weights[static_cast<size_t>(n * HIDDEN + k)];
  }
  std::vector<double> last_row;
  for (int64_t h = 0; h < HEADS; h++)
    for (double v : attended(rows, TOKENS - 1, h)) last_row.push_back(v);
  for (int64_t n = 0; n < HIDDEN; n++) {
    double expected = 0;
    for (size_t k = 0; k < last_row.size(); k++)
      expected += last_row[k] * head[static_cast<size_t>(n * HEADS * DIM) + k];
    if (!close(logits[static_cast<size_t>(n)], expected, type == Type::BF16 ? 0.1 : 1e-4)) {
      std::fprintf(stderr, "output %d is %g and not %g\n", static_cast<int>(n),
                   static_cast<double>(logits[static_cast<size_t>(n)]), expected);
      return false;
    }
  }
  return true;
}

// The largest outputs of a wide layer, found by a screen and among all.
bool screen_is_right(Type type) {
  constexpr int64_t WIDE = 4100;
  const auto table = filled(TOKENS * HIDDEN, 4), weights = filled(WIDE * HIDDEN, 5);
  Program program;
  const int x = program.add_buffer(HIDDEN, Type::FLOAT, Rows::TOKENS);
  const int wanted = program.add_buffer(HIDDEN, activation_type(type), Rows::OUTPUTS);
  const int matrix = program.add_matrix(WIDE, HIDDEN, type, false);
  program.matrix(matrix).fill(weights.data(), Type::FLOAT, 0, WIDE, 0);
  program.add(EmbedOp{{table.data(), Type::FLOAT, TOKENS, HIDDEN, 1.f}, x});
  program.add(CopyOp{x, wanted});
  program.add_screened(LinearOp{matrix, Epilogue{}, {}, wanted, LOGITS});
  program.fill_screen(0, 1);
  std::vector<int64_t> numbers;
  for (int64_t t = 0; t < TOKENS; t++) numbers.push_back(t);
  const int32_t tables[] = {0, 1}, starts[] = {0, TOKENS}, context[] = {TOKENS};
  const KVKind kind{numbers.data(), tables, 2, 2};
  std::vector<float> logits(static_cast<size_t>(TOKENS * WIDE));
  float largest[2][TOKENS];
  int64_t places[2][TOKENS];
  Pool pool(2, 50);
  for (int64_t only : {0, 1}) {
    const StepInput step{TOKENS, 1, TOKENS, 1, 0, BLOCK, numbers.data(), numbers.data(), starts,
                         context, numbers.data(), &kind, nullptr, nullptr, nullptr, logits.data(),
                         largest[only], places[only], only};
    program.run(pool, step);
  }
  for (int64_t t = 0; t < TOKENS; t++) {
    if (largest[0][t] == largest[1][t] && places[0][t] == places[1][t]) continue;
    std::fprintf(stderr, "the largest output of row %d is not found\n", static_cast<int>(t));
    return false;
  }
  return true;
}

// The outputs of a layer, with its weights in full or with short exponents.
std::vector<float> outputs_of(Type type, const std::vector<float>& weights, bool is_short) {
  const int64_t wide = static_cast<int64_t>(weights.size()) / HIDDEN;
  const auto table = filled(TOKENS * HIDDEN, 6);
  Program program;
  const int x = program.add_buffer(HIDDEN, Type::FLOAT, Rows::TOKENS);
  const int wanted = program.add_buffer(HIDDEN, activation_type(type), Rows::OUTPUTS);
  // Of zero, and of what is at least an eighth and less than two.
  const ShortExponents exponents{{0, 62, 63, 64, 65, 66, 67, 68}, 1};
  const int matrix = program.add_matrix(wide, HIDDEN, type, false, Coding(),
                                        is_short ? &exponents : nullptr);
  program.matrix(matrix).fill(weights.data(), Type::FLOAT, 0, wide, 0);
  program.seal();
  program.add(EmbedOp{{table.data(), Type::FLOAT, TOKENS, HIDDEN, 1.f}, x});
  program.add(CopyOp{x, wanted});
  program.add(LinearOp{matrix, Epilogue{}, {}, wanted, LOGITS});
  std::vector<int64_t> numbers;
  for (int64_t t = 0; t < TOKENS; t++) numbers.push_back(t);
  const int32_t tables[] = {0, 1}, starts[] = {0, TOKENS}, context[] = {TOKENS};
  const KVKind kind{numbers.data(), tables, 2, 2};
  std::vector<float> logits(static_cast<size_t>((1 + TOKENS) * wide));
  Pool pool(2, 50);
  // One row, which one tile computes, and all of them, which several do.
  for (int64_t rows : {int64_t{1}, TOKENS}) {
    const StepInput step{TOKENS, 1, rows, 1, 0, BLOCK, numbers.data(), numbers.data(), starts, context,
                         numbers.data(), &kind, nullptr, nullptr, nullptr,
                         logits.data() + (rows > 1 ? wide : 0), nullptr, nullptr};
    program.run(pool, step);
  }
  return logits;
}

bool short_exponents_are_right(Type type) {
  if (!HAS_SHORT_EXPONENTS) return true;
  auto weights = filled(70 * HIDDEN, 7);
  weights[1234] = 1e-20f;
  if (outputs_of(type, weights, true) == outputs_of(type, weights, false)) return true;
  std::fprintf(stderr, "weights with short exponents are others\n");
  return false;
}

bool functions_are_right() {
  for (float x = -20.f; x < 20.f; x += 0.37f) {
    float lanes[LANES];
    store(lanes, exp(set1(x)));
    if (!close(lanes[3] / std::exp(x), 1, 1e-6)) return false;
    store(lanes, tanh(set1(x)));
    if (!close(lanes[5], std::tanh(x), 1e-6)) return false;
  }
  return true;
}

}  // namespace

// 0 if all is right.
extern "C" int penstock_self_test() {
  try {
    if (!functions_are_right()) return 2;
    if (!screen_is_right(Type::FLOAT) || !screen_is_right(Type::BF16)) return 4;
    if (!short_exponents_are_right(Type::WIDENED) || !short_exponents_are_right(Type::BF16)) return 5;
    return layer_is_right(Type::FLOAT) && layer_is_right(Type::BF16) ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}
