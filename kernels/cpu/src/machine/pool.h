// Threads that compute one round of work together, again and again.
//
// A round is a list of stages, a stage a number of items; a stage begins when all items of the one
// before are done. Each thread takes a share of neighbouring items in order, so that it reads on
// where it stopped. Then it takes what others have left of theirs. No thread waits for another: if
// the system put one aside, or it wakes late, others have taken its items. It joins at the stage
// they are at.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "rounding.h"

namespace penstock {

// Items for each thread, so that one that the system interrupts leaves its share to the others.
constexpr int64_t ITEMS_PER_THREAD = 4;

class Work {
 public:
  // Computes one item; called from any thread of the pool, at most once for each item of a round.
  virtual void compute(int stage, uint32_t item, int thread) = 0;
  // Called by any thread for each of a stage's last items, the very last among them: after the item
  // is computed and before it counts, so that the round is still going on.
  virtual void nearly_completed(int) {}

 protected:
  ~Work() = default;
};

class Pool {
 public:
  // `threads` includes the one that calls run(). Between rounds the others look for work for
  // `spin_us` microseconds before they sleep. If they are pinned, each keeps to one of the cores
  // that the process may use, from the second on: the first is left to the caller, who moves freely.
  Pool(int threads, int spin_us, bool pinned = false);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // Computes all stages, in order; items[s] is the number of items of stage s. One round at a time:
  // a second caller waits. Throws std::logic_error if the calling thread has started one itself.
  void run(Work& work, const std::vector<uint32_t>& items) {
    start(work, items);
    finish();
  }
  // The same in two parts: between them the caller does something else, while the other threads
  // compute. It must call finish(), where it takes part, from the same thread.
  void start(Work& work, const std::vector<uint32_t>& items);
  void finish();

 private:
  struct State;
  // A forked child has none of its parent's threads, and must not touch what they were doing.
  State& state_of_this_process();

  const int threads_;
  const int spin_us_;
  const bool pinned_;
  State* state_ = nullptr;
};

}  // namespace penstock
