// Whole parts of a number.
#pragma once

#include <cstdint>

namespace penstock {

// How many parts of b make at least a; both positive.
constexpr int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
// The least multiple of b that is at least a.
constexpr int64_t rounded_up(int64_t a, int64_t b) { return divided_up(a, b) * b; }

}  // namespace penstock
