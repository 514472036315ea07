#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/affinity.h"
#include "effinfer/device.h"
#include "effinfer/error.h"
#include "effinfer/placement.h"
#include "effinfer/threads.h"

namespace effinfer {
namespace {

using Clock = std::chrono::steady_clock;

// Long enough to bridge the gap between two kernels of a step, short enough that a descheduled
// partner costs little: two members on one CPU lose milliseconds to an unbounded spin.
constexpr auto kSpin = std::chrono::microseconds(20);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr,
          nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
          nullptr, 0);
}

// A counter that waiters watch: spin, then sleep until it leaves `seen`.
class Epoch {
 public:
  uint32_t load() const { return word_.load(std::memory_order_acquire); }

  void advance() {
    word_.fetch_add(1);
    if (sleepers_.load() > 0) futex_wake_all(word_);
  }

  void wait_past(uint32_t seen, bool spin) {
    if (spin) {
      const Clock::time_point deadline = Clock::now() + kSpin;
      do {
        for (int i = 0; i < 16; ++i) {
          if (load() != seen) return;
          relax();
        }
      } while (Clock::now() < deadline);
    }
    sleepers_.fetch_add(1);
    while (load() == seen) futex_wait(word_, seen);
    sleepers_.fetch_sub(1);
  }

 private:
  alignas(64) std::atomic<uint32_t> word_{0};
  std::atomic<int> sleepers_{0};
};

struct Free {
  void operator()(void* pointer) const { std::free(pointer); }
};

}  // namespace

// What the members of a team share; one per pool.
class TeamShared {
 public:
  TeamShared(int size, bool spin) : size_(size), spin_(spin), scratch_(static_cast<size_t>(size)) {}

  int size() const { return size_; }
  int64_t claim() { return next_chunk_.fetch_add(1, std::memory_order_relaxed); }

  void barrier() {
    if (size_ == 1) {
      next_chunk_.store(0, std::memory_order_relaxed);
      return;
    }
    const uint32_t seen = epoch_.load();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_chunk_.store(0, std::memory_order_relaxed);
      epoch_.advance();
    } else {
      epoch_.wait_past(seen, spin_);
    }
  }

  void start_region() { next_chunk_.store(0, std::memory_order_relaxed); }

  void* scratch(int rank) const { return scratch_[static_cast<size_t>(rank)].get(); }
  size_t scratch_bytes() const { return scratch_bytes_; }

  void reserve_scratch(size_t bytes) {
    if (bytes <= scratch_bytes_) return;
    const size_t rounded = (bytes + 63) / 64 * 64;
    std::vector<std::unique_ptr<void, Free>> fresh(scratch_.size());
    for (auto& member : fresh) {
      member.reset(std::aligned_alloc(64, rounded));
      if (!member) {
        throw OutOfMemory("[threads] no memory for " + std::to_string(rounded) +
                          " bytes of scratch a thread");
      }
    }
    scratch_ = std::move(fresh);
    scratch_bytes_ = rounded;
  }

 private:
  const int size_;
  const bool spin_;
  alignas(64) std::atomic<int64_t> next_chunk_{0};
  alignas(64) std::atomic<int> arrived_{0};
  Epoch epoch_;
  std::vector<std::unique_ptr<void, Free>> scratch_;
  size_t scratch_bytes_ = 0;
};

int Team::size() const {
  return alone_ ? 1 : shared_.size();
}
void Team::barrier() {
  if (alone_) {
    next_chunk_ = 0;
    return;
  }
  ++barriers_;
  shared_.barrier();
}
int64_t Team::claim() {
  return alone_ ? next_chunk_++ : shared_.claim();
}
void* Team::scratch() const {
  return shared_.scratch(rank_);
}
size_t Team::scratch_bytes() const {
  return shared_.scratch_bytes();
}

namespace {

// effinfer's own threads: the caller is rank 0, workers wait on an epoch for the next task.
class WorkerPool : public Dispatcher {
 public:
  // `cores`: none, or one a member.
  WorkerPool(int threads, bool spin, std::vector<int> cores = {})
      : threads_(threads), spin_(spin), cores_(std::move(cores)) {
    for (int rank = 1; rank < threads; ++rank) {
      workers_.emplace_back([this, rank] { work(rank); });
    }
  }

  ~WorkerPool() override {
    stop_ = true;
    start_.advance();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const override { return threads_; }
  const std::vector<int>& cores() const { return cores_; }

  void dispatch(void (*task)(void*, int), void* context) override {
    task_ = task;
    context_ = context;
    running_.store(threads_ - 1, std::memory_order_release);
    start_.advance();
    std::optional<core::PinnedHere> pinned;
    if (!cores_.empty()) pinned.emplace(cores_[0]);
    task(context, 0);
    while (true) {
      const uint32_t seen = done_.load();
      if (running_.load(std::memory_order_acquire) == 0) return;
      done_.wait_past(seen, spin_);
    }
  }

 private:
  void work(int rank) {
    if (!cores_.empty()) core::pin_thread({&cores_[static_cast<size_t>(rank)], 1});
    uint32_t seen = 0;
    while (true) {
      start_.wait_past(seen, spin_);
      ++seen;
      if (stop_) return;
      task_(context_, rank);
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.advance();
    }
  }

  const int threads_;
  const bool spin_;
  const std::vector<int> cores_;
  std::atomic<bool> stop_{false};
  void (*task_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::atomic<int> running_{0};
  Epoch start_;
  Epoch done_;
  std::vector<std::thread> workers_;
};

// The members of effinfer's own pool, and whether waiting for them is worth spinning: not with more
// of them than CPUs, where it would only delay the one that is waited for, nor under a quota.
struct Plan {
  ThreadChoice choice;
  bool spin;
};

Plan plan_workers(int threads, bool oversubscribe) {
  if (threads < 0) {
    throw InvalidArgument("[threads] expected 0 (as many as fit) or more threads, got " +
                          std::to_string(threads));
  }
  ThreadChoice choice = usable_threads(threads);
  const bool more = oversubscribe && threads > choice.threads;
  if (more) {
    choice.threads = threads;
    choice.reason = "asked for, more than CPUs";
  }
  if (choice.threads > 1024) {
    throw InvalidArgument("[threads] expected at most 1024 threads, got " +
                          std::to_string(choice.threads));
  }
  return {choice, !choice.quota_limited && !more};
}

std::string listed_cores(const std::vector<int>& cores) {
  return name(Placement{{}, cores}).substr(4);
}

Plan plan_dispatcher(const Dispatcher& dispatcher) {
  const ThreadChoice usable = usable_threads(dispatcher.threads());
  const auto* own = dynamic_cast<const WorkerPool*>(&dispatcher);
  const std::string reason = own == nullptr
                                 ? "the given dispatcher's"
                                 : "one for each of the cores " + listed_cores(own->cores());
  return {{dispatcher.threads(), usable.quota_limited, reason},
          !usable.quota_limited && dispatcher.threads() <= usable.threads};
}

}  // namespace

struct ThreadPool::Impl {
  explicit Impl(const Plan& plan, std::shared_ptr<Dispatcher> given = nullptr)
      : dispatcher(given ? std::move(given)
                         : std::make_shared<WorkerPool>(plan.choice.threads, plan.spin)),
        reason(plan.choice.reason),
        shared(plan.choice.threads, plan.spin) {}

  std::shared_ptr<Dispatcher> dispatcher;
  std::string reason;
  TeamShared shared;
  std::mutex turn;
};

ThreadPool::ThreadPool(int threads, bool oversubscribe)
    : impl_(std::make_unique<Impl>(plan_workers(threads, oversubscribe))) {}

ThreadPool::ThreadPool(std::shared_ptr<Dispatcher> dispatcher) {
  if (!dispatcher || dispatcher->threads() < 1) {
    throw InvalidArgument("[threads] dispatcher: expected one with at least one thread");
  }
  const Plan plan = plan_dispatcher(*dispatcher);
  impl_ = std::make_unique<Impl>(plan, std::move(dispatcher));
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::size() const {
  return impl_->shared.size();
}

const std::string& ThreadPool::reason() const {
  return impl_->reason;
}

void ThreadPool::parallel(const std::function<void(Team&)>& body) {
  const std::lock_guard lock(impl_->turn);
  struct Region {
    const std::function<void(Team&)>& body;
    TeamShared& shared;
    std::mutex mutex;
    std::exception_ptr error;
  } region{body, impl_->shared, {}, nullptr};
  impl_->shared.start_region();
  impl_->dispatcher->dispatch(
      [](void* context, int rank) {
        Region& r = *static_cast<Region*>(context);
        Team team(r.shared, rank);
        try {
          r.body(team);
        } catch (...) {
          const std::lock_guard error_lock(r.mutex);
          if (!r.error) r.error = std::current_exception();
        }
      },
      &region);
  if (region.error) std::rethrow_exception(region.error);
}

void ThreadPool::reserve_scratch(size_t bytes) {
  const std::lock_guard lock(impl_->turn);
  impl_->shared.reserve_scratch(bytes);
}

std::shared_ptr<ThreadPool> pinned_pool(const std::vector<int>& cores, int threads) {
  const std::vector<int> usable = usable_cores();
  std::vector<int> sorted = cores;
  std::sort(sorted.begin(), sorted.end());
  const bool repeats = std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
  const bool known = std::includes(usable.begin(), usable.end(), sorted.begin(), sorted.end());
  if (cores.empty() || repeats || !known) {
    std::string got;
    for (const int core : cores) got.append(got.empty() ? "" : ",").append(std::to_string(core));
    throw InvalidArgument("[threads] cores: expected some of " + listed_cores(usable) +
                          ", each once, got " + (got.empty() ? "none" : got));
  }
  if (threads < 0) plan_workers(threads, false);  // throws
  std::vector<int> taken = cores;
  if (threads > 0) taken.resize(std::min(cores.size(), static_cast<size_t>(threads)));
  const bool spin = !usable_threads(0).quota_limited;
  return std::make_shared<ThreadPool>(
      std::make_shared<WorkerPool>(static_cast<int>(taken.size()), spin, taken));
}

std::vector<int> cores_of(ThreadPool& pool) {
  std::mutex mutex;
  std::vector<int> all;
  pool.parallel([&](Team&) {
    const std::vector<int> own = usable_cores();
    const std::lock_guard lock(mutex);
    all.insert(all.end(), own.begin(), own.end());
  });
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

}  // namespace effinfer
