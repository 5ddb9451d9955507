// The C interface, as library.py binds it. Whatever goes wrong is a text in `error` and a result
// of -1; no exception leaves the library. Arrays are copied unless a comment says otherwise.
#include <stdexcept>

#include "guarded.h"
#include "program.h"

using namespace penstock;

namespace {

std::vector<float> copied(const float* values, int64_t count) {
  return values ? std::vector<float>(values, values + count) : std::vector<float>();
}

}  // namespace

extern "C" {

struct NormSpec {
  int64_t columns, count;  // of `count` norms side by side
  const float *weight, *bias;
  float epsilon;
  int32_t centred;
};

// In the order of the packed outputs.
static void pack_bias(const Matrix& m, const float* bias, float* packed) {
  for (int64_t n = 0; n < m.outputs; n++) {
    if (!m.gated) {
      packed[n] = bias[n];
      continue;
    }
    const int64_t at = n / LANES * PANEL + n % LANES;
    packed[at] = bias[n];
    packed[at + LANES] = bias[m.outputs + n];
  }
}

static std::vector<Norm> norms_of(const NormSpec& spec) {
  std::vector<Norm> norms;
  for (int64_t i = 0; i < spec.count; i++) {
    const auto at = [&](const float* p) { return p ? p + i * spec.columns : nullptr; };
    norms.push_back(Norm{spec.columns, spec.centred != 0, spec.epsilon,
                         copied(at(spec.weight), spec.columns), copied(at(spec.bias), spec.columns)});
  }
  return norms;
}

struct LinearSpec {
  int32_t matrix, input, output, activation;
  float scale, softcap, slope, limit;  // the last two of CLAMPED_SWIGLU
  int32_t add, screened;  // the latter of logits: whether to find the largest of them by a screen
  const float* bias;  // of each output; a gated layer's: those of the gate, then the others
};

struct RotateSpec {
  int32_t buffer, interleaved;
  int64_t heads, kv_heads, key_dim, value_dim, layer, rotary_dims, positions;
  const float *cosines, *sines;  // kept by the caller as long as the program
  NormSpec query_norm, key_norm;
};

struct AttendSpec {
  int32_t input, output;
  int64_t heads, kv_heads, key_dim, value_dim, layer, window;
  float scale, softcap;
  const float* sinks;
};

const char* penstock_instruction_set() {
#if defined(__AVX512BF16__)
  return "avx512bf16";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
  return "avx2";
#else
  return "portable";
#endif
}

int penstock_input_type(Program* p, int matrix, Error* error) {
  return guarded(error, [&] { return static_cast<int>(input_type(p->matrix(matrix))); });
}

int penstock_activation_type(int type) {
  return static_cast<int>(activation_type(static_cast<Type>(type)));
}

Pool* penstock_pool_create(int threads, int spin_us, int pinned) {
  try {
    return new Pool(threads, spin_us, pinned != 0);
  } catch (const std::exception&) {
    return nullptr;
  }
}
void penstock_pool_destroy(Pool* pool) { delete pool; }

Program* penstock_create(int cache_type) {
  try {
    auto* program = new Program;
    program->set_cache_type(static_cast<Type>(cache_type));
    return program;
  } catch (const std::exception&) {
    return nullptr;
  }
}
void penstock_destroy(Program* program) { delete program; }

// Of steps from now on.
int penstock_cache_type(Program* p, int type, Error* error) {
  return guarded(error, [&] {
    p->set_cache_type(static_cast<Type>(type));
    return 0;
  });
}

int penstock_buffer(Program* p, int64_t columns, int type, int rows, int64_t copies,
                    Error* error) {
  return guarded(error, [&] {
    return p->add_buffer(columns, static_cast<Type>(type), static_cast<Rows>(rows), copies);
  });
}

int penstock_matrix(Program* p, int64_t outputs, int64_t inputs, int type, int gated,
                    Error* error) {
  return guarded(error, [&] {
    return p->add_matrix(outputs, inputs, static_cast<Type>(type), gated != 0);
  });
}

// Eight `exponents`; `exceptions` counts the weights with other ones. See short_exponents.h.
int penstock_short_matrix(Program* p, int64_t outputs, int64_t inputs, int type, int gated,
                          const uint8_t* exponents, int64_t exceptions, Error* error) {
  return guarded(error, [&] {
    ShortExponents few{{}, exceptions};
    std::memcpy(few.exponents.data(), exponents, few.exponents.size());
    return p->add_matrix(outputs, inputs, static_cast<Type>(type), gated != 0, Coding(), &few);
  });
}

int penstock_has_short_exponents() { return HAS_SHORT_EXPONENTS; }

// Adds to `counts` [128].
void penstock_count_exponents(const void* values, int type, int64_t count, int64_t* counts) {
  count_exponents(values, static_cast<Type>(type), count, counts);
}

// When all matrices are filled.
int penstock_seal(Program* p, Error* error) {
  return guarded(error, [&] {
    p->seal();
    return 0;
  });
}

// Rows [count, inputs] of `source` are the weights of outputs `first` and after. Of one matrix by one
// thread at a time, as outputs may share bytes.
int penstock_fill(Program* p, int matrix, const void* source, int source_type, int64_t first,
                  int64_t count, int part, Error* error) {
  return guarded(error, [&] {
    Matrix& m = p->fillable(matrix);
    if (m.is_coded()) throw std::invalid_argument("numbers for a matrix of codes");
    if (first < 0 || count < 0 || first + count > m.outputs || part < 0 || part > int(m.gated))
      throw std::invalid_argument("weights of outputs that the matrix does not have");
    m.fill(source, static_cast<Type>(source_type), first, count, part);
    return 0;
  });
}

// `values` are what the codes stand for if they name one of sixteen.
int penstock_coded_matrix(Program* p, int64_t outputs, int64_t inputs, int type, int gated,
                          int codes, int64_t group, int offsets, const float* values,
                          Error* error) {
  return guarded(error, [&] {
    if (codes <= 0 || codes >= static_cast<int>(Codes::COUNT))
      throw std::invalid_argument("no such codes");
    Coding coding{static_cast<Codes>(codes), group, offsets != 0, {}};
    for (int i = 0; i < 16; i++) coding.values[i] = values ? values[i] : static_cast<float>(i - 8);
    return p->add_matrix(outputs, inputs, static_cast<Type>(type), gated != 0, coding);
  });
}

// As penstock_fill: codes [count, inputs], scales and offsets [count, groups].
int penstock_fill_codes(Program* p, int matrix, const uint8_t* codes, const float* scales,
                        const float* offsets, int64_t first, int64_t count, int part,
                        Error* error) {
  return guarded(error, [&] {
    Matrix& m = p->fillable(matrix);
    if (!m.is_coded() || (m.coding.offsets && !offsets))
      throw std::invalid_argument("codes for a matrix that has none, or other ones");
    if (first < 0 || count < 0 || first + count > m.outputs || part < 0 || part > int(m.gated))
      throw std::invalid_argument("weights of outputs that the matrix does not have");
    m.fill(codes, scales, offsets, first, count, part);
    return 0;
  });
}

int penstock_map_weights(Program* p, const char* path, Error* error) {
  return guarded(error, [&] {
    p->map_weights(path);
    return 0;
  });
}

int penstock_write_weights(Program* p, const char* path, int64_t* bytes, Error* error) {
  return guarded(error, [&] {
    *bytes = p->write_weights(path);
    return 0;
  });
}

int penstock_fits_bf16(const float* values, int64_t count) { return fits_bf16(values, count); }

int64_t penstock_weight_bytes(Program* p) { return p->weight_bytes(); }

int penstock_choose_ways(Program* p, Error* error) {
  return guarded(error, [&] {
    p->choose_ways();
    return 0;
  });
}

// `table` stays the caller's, as long as the program.
int penstock_embed(Program* p, const void* table, int type, int64_t vocabulary, int64_t columns,
                   float scale, int output, Error* error) {
  return guarded(error, [&] {
    p->add(EmbedOp{{table, static_cast<Type>(type), vocabulary, columns, scale}, output});
    return 0;
  });
}

int penstock_norm(Program* p, const NormSpec* spec, int input, int output, int type, int add,
                  float scale, Error* error) {
  return guarded(error, [&] {
    if (spec->count != 1) throw std::invalid_argument("a row has one norm");
    p->add(NormOp{norms_of(*spec).front(), {static_cast<Type>(type), add != 0, scale}, input,
                  output});
    return 0;
  });
}

static Epilogue epilogue_of(const LinearSpec& s, int type) {
  if (s.activation < 0 || s.activation >= static_cast<int32_t>(Activation::COUNT))
    throw std::invalid_argument("no such activation");
  Epilogue epilogue;
  epilogue.activation = static_cast<Activation>(s.activation);
  epilogue.clamp = {s.slope, s.limit};
  epilogue.scale = s.scale;
  epilogue.softcap = s.softcap;
  epilogue.add = s.add != 0;
  epilogue.type = static_cast<Type>(type);
  return epilogue;
}

// Whether a screen was made.
int penstock_linear(Program* p, const LinearSpec* s, int type, Error* error) {
  return guarded(error, [&] {
    const Matrix& m = p->matrix(s->matrix);
    LinearOp op{s->matrix, epilogue_of(*s, type), {}, s->input, s->output};
    if (s->bias) {
      op.bias.assign(static_cast<size_t>(m.panels * PANEL), 0.f);
      pack_bias(m, s->bias, op.bias.data());
    }
    if (s->screened) return static_cast<int>(p->add_screened(std::move(op)));
    p->add(std::move(op));
    return 0;
  });
}

int penstock_fill_screen(Program* p, int64_t part, int64_t parts, Error* error) {
  return guarded(error, [&] {
    if (part < 0 || part >= parts) throw std::invalid_argument("no such part of a screen");
    p->fill_screen(part, parts);
    return 0;
  });
}

int penstock_rotate(Program* p, const RotateSpec* s, Error* error) {
  return guarded(error, [&] {
    Rotate rotate{s->heads, s->kv_heads, s->key_dim, s->value_dim, s->layer,
                  {s->cosines, s->sines, s->positions, s->rotary_dims, s->interleaved != 0},
                  norms_of(s->query_norm), norms_of(s->key_norm)};
    p->add(RotateOp{std::move(rotate), s->buffer});
    return 0;
  });
}

int penstock_attend(Program* p, const AttendSpec* s, Error* error) {
  return guarded(error, [&] {
    Attention attention{s->heads,  s->kv_heads, s->key_dim, s->value_dim,
                        s->scale,  s->window,   s->softcap, copied(s->sinks, s->heads),
                        s->layer};
    p->add(AttendOp{std::move(attention), s->input, s->output});
    return 0;
  });
}

int penstock_copy(Program* p, int input, int output, Error* error) {
  return guarded(error, [&] {
    p->add(CopyOp{input, output});
    return 0;
  });
}

int penstock_route(Program* p, int input, int64_t experts, int64_t chosen, int normalised,
                   Error* error) {
  return guarded(error, [&] {
    p->add(RouteOp{{experts, chosen, normalised != 0}, input});
    return 0;
  });
}

int penstock_gather(Program* p, int input, int output, Error* error) {
  return guarded(error, [&] {
    p->add(GatherOp{input, output});
    return 0;
  });
}

// `s->matrix` is the first expert's; `s->bias` has those of all experts, one after the other.
int penstock_experts(Program* p, const LinearSpec* s, int64_t experts, int type, Error* error) {
  return guarded(error, [&] {
    const Matrix& m = p->matrix(s->matrix);
    ExpertsOp op{s->matrix, experts, epilogue_of(*s, type), {}, s->input, s->output};
    if (s->bias && experts > 0) {
      op.biases.assign(static_cast<size_t>(experts * m.panels * PANEL), 0.f);
      for (int64_t e = 0; e < experts; e++)
        pack_bias(m, s->bias + e * m.outputs * (m.gated ? 2 : 1),
                  op.biases.data() + e * m.panels * PANEL);
    }
    p->add(std::move(op));
    return 0;
  });
}

int penstock_combine(Program* p, int input, int output, int add, float scale, Error* error) {
  return guarded(error, [&] {
    p->add(CombineOp{input, output, add != 0, scale});
    return 0;
  });
}

// What the step points at stays as it is until penstock_finish, from the same thread.
int penstock_start(Program* p, Pool* pool, const StepInput* step, Error* error) {
  return guarded(error, [&] {
    p->start(*pool, *step);
    return 0;
  });
}

void penstock_finish(Program* p, Pool* pool) { p->finish(*pool); }

int penstock_op_kinds() { return static_cast<int>(OP_KINDS); }
void penstock_times(Program* p, int64_t* nanoseconds) { p->take_times(nanoseconds); }

}  // extern "C"
