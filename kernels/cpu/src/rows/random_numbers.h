// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC'11): random_numbers.py has the same in PyTorch.
#pragma once

#include <cstdint>

namespace penstock {

// Twice 31 random bits.
struct RandomBits {
  uint32_t high, low;
};

inline RandomBits random_bits(int64_t seed, int64_t choice, int64_t index, int64_t stream) {
  uint32_t even[2] = {static_cast<uint32_t>(index), static_cast<uint32_t>(stream)};
  uint32_t odd[2] = {static_cast<uint32_t>(choice), 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed),
                     static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t first = uint64_t{0xd2511f53u} * even[0], second = uint64_t{0xcd9e8d57u} * even[1];
    even[0] = static_cast<uint32_t>(second >> 32) ^ odd[0] ^ key[0];
    even[1] = static_cast<uint32_t>(first >> 32) ^ odd[1] ^ key[1];
    odd[0] = static_cast<uint32_t>(second);
    odd[1] = static_cast<uint32_t>(first);
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
  return {even[0] >> 1, odd[0] >> 1};
}

}  // namespace penstock
