// exp, log, tanh and the activations of gated and plain MLPs, sixteen values at a time.
#pragma once

#include "vec.h"

namespace penstock {

enum class Activation : int32_t { NONE, SILU, GELU_TANH, GELU_ERF, RELU, CLAMPED_SWIGLU, COUNT };

// Of CLAMPED_SWIGLU: (up + 1) * gate * sigmoid(slope * gate), both within the limit, gate above alone.
struct Clamp {
  float slope = 1.f, limit = 0.f;
};

// Right to about one unit in the last place (polynomial of the Cephes library, Moshier 1984).
// Clamps at the ends of the range, so -inf gives almost nothing instead of zero.
inline Vec exp(Vec x) {
  x = min(max(x, set1(-87.3f)), set1(88.3f));
  const Vec shift = set1(12582912.f);  // 1.5 * 2 ** 23: adding it rounds to a whole number
  const Vec n = fma(x, set1(1.44269504f), shift) - shift;
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.f);
  return p * power_of_two(n);
}

// Of positive normal numbers; right to about one unit in the last place (Cephes, as above).
inline Vec log(Vec x) {
  const Vec one = set1(1.f), f = fraction(x), e = exponent(x);
  // x = (1 + m) * 2 ** n, with 1 + m from sqrt(1/2) to sqrt(2).
  const Vec n = where_less(f, set1(1.41421356f), e, e + one);
  const Vec m = where_less(f, set1(1.41421356f), f, f * set1(0.5f)) - one;
  Vec p = set1(7.0376836292e-2f);
  p = fma(p, m, set1(-1.1514610310e-1f));
  p = fma(p, m, set1(1.1676998740e-1f));
  p = fma(p, m, set1(-1.2420140846e-1f));
  p = fma(p, m, set1(1.4249322787e-1f));
  p = fma(p, m, set1(-1.6668057665e-1f));
  p = fma(p, m, set1(2.0000714765e-1f));
  p = fma(p, m, set1(-2.4999993993e-1f));
  p = fma(p, m, set1(3.3333331174e-1f));
  const Vec z = m * m;
  Vec y = fma(n, set1(-2.12194440e-4f), p * m * z);
  y = fma(z, set1(-0.5f), y);
  return fma(n, set1(0.693359375f), m + y);
}

// log(1 - x) of 0 < x < 1, where the difference may round.
inline Vec log_below_one(Vec x) {
  const Vec one = set1(1.f), rounded = one - x;
  const Vec lost = (one - rounded) - x;
  return log(rounded) + lost / rounded;
}

inline Vec tanh(Vec x) {
  const Vec bounded = min(max(x, set1(-15.f)), set1(15.f));
  const Vec far = set1(1.f) - set1(2.f) / (exp(bounded + bounded) + set1(1.f));
  // Near zero the difference above loses digits: Cephes' polynomial of x ** 2.
  const Vec z = x * x;
  Vec p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const Vec near = fma(p * z, x, x);
  return where_less(max(x, -x), set1(0.625f), near, far);
}

inline Vec erf(Vec x) {
  float lanes[LANES];
  store(lanes, x);
  for (float& lane : lanes) lane = std::erf(lane);
  return load(lanes);
}

inline Vec activate(Activation activation, Vec x) {
  const Vec one = set1(1.f), half = set1(0.5f);
  switch (activation) {
    case Activation::SILU:
      return x / (one + exp(-x));
    case Activation::GELU_TANH: {
      const Vec inner = set1(0.7978845608f) * fma(x * x * x, set1(0.044715f), x);
      return half * x * (one + tanh(inner));
    }
    case Activation::GELU_ERF:
      return half * x * (one + erf(x * set1(0.7071067812f)));
    case Activation::RELU:
      return max(x, set1(0.f));
    default:
      return x;
  }
}

// activation(gate) * up. Where an operand of min and max is no number they give the second.
inline Vec gated(Activation activation, const Clamp& clamp, Vec gate, Vec up) {
  if (activation != Activation::CLAMPED_SWIGLU) return activate(activation, gate) * up;
  const Vec one = set1(1.f), limit = set1(clamp.limit);
  gate = min(limit, gate);
  up = max(set1(-clamp.limit), min(limit, up));
  return (up + one) * (gate / (one + exp(set1(-clamp.slope) * gate)));
}

}  // namespace penstock
