#include "pool.h"

#include <unistd.h>
#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

#include <chrono>
#include <stdexcept>

#include "vec.h"

namespace penstock {
namespace {

constexpr int PAUSES_BEFORE_YIELD = 1 << 12;
constexpr int PAUSES_BETWEEN_CLOCKS = 32;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Holds the round in its upper half and a share's next free item in its lower one. So a thread that
// is still in an earlier round can take nothing: its exchange fails.
struct alignas(64) Share {
  std::atomic<uint64_t> next{0};
};

struct alignas(64) Stage {
  std::atomic<uint32_t> done{0};
  std::atomic<uint32_t> items{0};
};

struct Board {
  Board(size_t capacity, size_t threads)
      : stages(capacity), shares(capacity * threads), threads(static_cast<uint32_t>(threads)) {}
  Share& share(uint32_t stage, uint32_t thread) { return shares[stage * threads + thread]; }

  std::vector<Stage> stages;
  std::vector<Share> shares;
  const uint32_t threads;
  std::atomic<uint32_t> used{0};
};

uint32_t share_begin(uint32_t items, uint32_t thread, uint32_t threads) {
  return static_cast<uint32_t>(uint64_t{items} * thread / threads);
}

// Keeps a thread to the `index`-th of the cores that the caller may use, counted round.
void pin(std::thread& thread, int index) {
#ifdef __linux__
  cpu_set_t usable, one;
  if (sched_getaffinity(0, sizeof usable, &usable) != 0) return;
  int left = index % CPU_COUNT(&usable);
  for (int core = 0; core < CPU_SETSIZE; core++)
    if (CPU_ISSET(core, &usable) && left-- == 0) {
      CPU_ZERO(&one);
      CPU_SET(core, &one);
      pthread_setaffinity_np(thread.native_handle(), sizeof one, &one);
      return;
    }
#else
  (void)thread, (void)index;
#endif
}

}  // namespace

struct Pool::State {
  const pid_t process = getpid();
  std::atomic<uint32_t> round{0};
  std::atomic<Board*> board{nullptr};
  std::atomic<Work*> work{nullptr};
  std::atomic<uint32_t> sleepers{0};
  std::atomic<bool> stop{false};
  std::mutex sleep;
  std::condition_variable wake;
  std::mutex running;
  std::atomic<std::thread::id> leader{};  // which holds `running`
  // Kept to the end: a late thread may look at an old one.
  std::vector<std::unique_ptr<Board>> boards;
  std::vector<std::thread> threads;

  void grow(size_t stages, size_t threads_of_pool) {
    boards.push_back(std::make_unique<Board>(stages, threads_of_pool));
    board.store(boards.back().get());
  }

  uint32_t next_round(uint32_t seen, int spin_us) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
    do {
      for (int i = 0; i < PAUSES_BETWEEN_CLOCKS; i++) {
        const uint32_t now = round.load(std::memory_order_acquire);
        if (now != seen || stop.load(std::memory_order_relaxed)) return now;
        pause();
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> lock(sleep);
    sleepers.fetch_add(1);  // before the look at `round`, as run() looks after it has set that
    wake.wait(lock, [&] { return round.load() != seen || stop.load(); });
    sleepers.fetch_sub(1);
    return round.load();
  }

  void serve(int thread, int spin_us) {
    for (uint32_t seen = 0;;) {
      seen = next_round(seen, spin_us);
      if (stop.load()) return;
      take_part(seen, thread);
    }
  }

  // Computes what is left of a share; false: the round is over.
  bool take_share(Board& shared, uint32_t stage, uint32_t owner, uint32_t end, uint32_t mine,
                  int thread) {
    Share& share = shared.share(stage, owner);
    uint64_t ticket = share.next.load(std::memory_order_acquire);
    for (;;) {
      if (static_cast<uint32_t>(ticket >> 32) != mine) return false;
      const uint32_t item = static_cast<uint32_t>(ticket);
      if (item >= end) return true;
      if (!share.next.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                            std::memory_order_acquire))
        continue;
      // From here the round cannot end before `done` is counted up: all it uses is stable.
      Work& now = *work.load(std::memory_order_relaxed);
      now.compute(static_cast<int>(stage), item, thread);
      Stage& at = shared.stages[stage];
      if (at.done.load(std::memory_order_relaxed) + shared.threads >=
          at.items.load(std::memory_order_relaxed))
        now.nearly_completed(static_cast<int>(stage));
      at.done.fetch_add(1, std::memory_order_release);
      ticket = share.next.load(std::memory_order_acquire);
    }
  }

  // Until the round is over. Stages of `board` are safe to look at even then: they are never freed,
  // and a newer round shows in their tags.
  void take_part(uint32_t mine, int thread) {
    Board& shared = *board.load(std::memory_order_acquire);
    const uint32_t stages = shared.used.load(std::memory_order_acquire);
    for (uint32_t s = 0; s < stages; s++) {
      Stage& stage = shared.stages[s];
      const uint32_t items = stage.items.load(std::memory_order_acquire);
      if (stage.done.load(std::memory_order_acquire) == items) continue;  // a thread that joins late passes by
      // Its own share first, in order; then what the others have left.
      for (uint32_t i = 0; i < shared.threads; i++) {
        const uint32_t owner = (static_cast<uint32_t>(thread) + i) % shared.threads;
        if (!take_share(shared, s, owner, share_begin(items, owner + 1, shared.threads), mine, thread))
          return;
      }
      for (int i = 0; stage.done.load(std::memory_order_acquire) != items; i++) {
        if (round.load(std::memory_order_relaxed) != mine) return;
        if (i < PAUSES_BEFORE_YIELD)
          pause();
        else
          std::this_thread::yield();
      }
    }
  }
};

Pool::Pool(int threads, int spin_us, bool pinned)
    : threads_(threads), spin_us_(spin_us), pinned_(pinned) {
  state_of_this_process();
}

Pool::~Pool() {
  if (!state_ || state_->process != getpid()) return;  // nobody to join in a forked child
  state_->stop.store(true);
  {
    std::lock_guard<std::mutex> lock(state_->sleep);
  }
  state_->wake.notify_all();
  for (auto& thread : state_->threads) thread.join();
  delete state_;
}

Pool::State& Pool::state_of_this_process() {
  if (!state_ || state_->process != getpid()) {
    state_ = new State;  // the parent's is left alone: its locks may be held for ever here
    state_->grow(512, static_cast<size_t>(threads_));
    for (int t = 1; t < threads_; t++) {
      state_->threads.emplace_back([state = state_, t, spin = spin_us_] { state->serve(t, spin); });
      if (pinned_) pin(state_->threads.back(), t);
    }
  }
  return *state_;
}

void Pool::start(Work& work, const std::vector<uint32_t>& items) {
  State& state = state_of_this_process();
  if (state.leader.load() == std::this_thread::get_id())
    throw std::logic_error("this thread has started a round that it has not finished");
  std::unique_lock<std::mutex> one_at_a_time(state.running);
  if (state.board.load()->stages.size() < items.size()) state.grow(2 * items.size(), static_cast<size_t>(threads_));
  Board& board = *state.board.load();
  uint32_t round = state.round.load() + 1;
  if (round == 0) round = 1;  // 0 is what fresh stages are tagged with
  state.work.store(&work);
  const uint64_t tag = static_cast<uint64_t>(round) << 32;
  for (uint32_t s = 0; s < items.size(); s++) {
    // Closes the shares before anything changes. A thread still in the last round may read the new
    // number of items, but sees the new tag and takes none.
    for (uint32_t t = 0; t < board.threads; t++)
      board.share(s, t).next.store(tag | UINT32_MAX, std::memory_order_relaxed);
    board.stages[s].items.store(items[s], std::memory_order_release);
    board.stages[s].done.store(0, std::memory_order_relaxed);
    for (uint32_t t = 0; t < board.threads; t++)
      board.share(s, t).next.store(tag | share_begin(items[s], t, board.threads),
                                   std::memory_order_release);
  }
  board.used.store(static_cast<uint32_t>(items.size()), std::memory_order_release);
  state.round.store(round);
  if (threads_ > 1 && state.sleepers.load()) {
    {
      std::lock_guard<std::mutex> lock(state.sleep);
    }
    state.wake.notify_all();
  }
  state.leader.store(std::this_thread::get_id());
  one_at_a_time.release();  // finish() unlocks it
}

void Pool::finish() {
  State& state = state_of_this_process();
  state.take_part(state.round.load(), 0);
  state.leader.store(std::thread::id());
  state.running.unlock();
}

}  // namespace penstock
