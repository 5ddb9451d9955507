// Zeroed memory aligned to cache lines, on huge pages where it is large.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "rounding.h"

namespace penstock {

class Memory {
 public:
  Memory() = default;
  // Throws std::bad_alloc. The pages are the system's zeros until they are written.
  explicit Memory(size_t bytes) {
    constexpr size_t HUGE_PAGE = size_t{2} << 20;
    const bool large = bytes >= HUGE_PAGE;
    length_ = bytes + (large ? HUGE_PAGE : 0) + 64;
    base_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) {
      base_ = nullptr;
      throw std::bad_alloc();
    }
    const uintptr_t align = large ? HUGE_PAGE : 64;
    data_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base_) + align - 1) & ~(align - 1));
#if defined(MADV_HUGEPAGE)
    if (large) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  // The first `bytes` of a file, to be read: processes that map it share the pages. Throws
  // std::bad_alloc.
  Memory(int file, size_t bytes) : length_(bytes) {
    base_ = mmap(nullptr, length_, PROT_READ, MAP_PRIVATE, file, 0);
    if (base_ == MAP_FAILED) {
      base_ = nullptr;
      throw std::bad_alloc();
    }
    data_ = static_cast<char*>(base_);
    madvise(base_, length_, MADV_WILLNEED);
  }
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory() {
    if (base_) munmap(base_, length_);
  }
  char* data() const { return data_; }

 private:
  void swap(Memory& other) {
    std::swap(base_, other.base_);
    std::swap(length_, other.length_);
    std::swap(data_, other.data_);
  }
  void* base_ = nullptr;
  size_t length_ = 0;
  char* data_ = nullptr;
};

// Cuts pieces off large memory, so that small ones lie on huge pages, too.
class Arena {
 public:
  // Zeros, aligned to cache lines; they live as long as the arena. Throws std::bad_alloc.
  char* take(size_t bytes) {
    bytes = whole_lines(bytes);
    if (bytes > left_) {
      if (is_file_) throw std::invalid_argument("the file has fewer weights than the program");
      // As much as there is already: few chunks, and little that is never touched.
      left_ = std::max(bytes, std::min(total_, MOST_CHUNK));
      chunks_.emplace_back(left_);
      next_ = chunks_.back().data();
      total_ += left_;
    }
    char* const piece = next_;
    next_ += bytes;
    left_ -= bytes;
    return piece;
  }

  // Gives pieces of a file from now on, one after the other, as they were written.
  void take_from(int file, size_t bytes) {
    chunks_.emplace_back(file, bytes);
    next_ = chunks_.back().data();
    left_ = bytes;
    is_file_ = true;
  }

  bool is_file() const { return is_file_; }

  static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  static constexpr size_t MOST_CHUNK = size_t{1} << 30;
  std::vector<Memory> chunks_;
  char* next_ = nullptr;
  size_t left_ = 0, total_ = 0;
  bool is_file_ = false;
};

// Bytes from one row of a matrix to the next: an odd number of cache lines. Otherwise the same
// column of many rows would fall into the same few sets of the cache.
inline int64_t padded_row(int64_t bytes) {
  const int64_t lines = divided_up(bytes, 64);
  return 64 * (lines | 1);
}

}  // namespace penstock
