// Fibers: stacks that one thread switches between, and what the sanitizers must know of an emulated
// machine. For ThreadSanitizer that one fiber runs after another orders nothing, only
// order_before() and order_after() do.
#pragma once

#include <cstddef>
#include <memory>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EFFINFER_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define EFFINFER_ASAN 1
#endif

#if defined(__x86_64__)
// Keeps the registers that a call must preserve and the stack pointer in *save, and takes the
// others' from `load`. swapcontext() also asks the kernel for the signal mask, which costs a
// hundred times as much.
extern "C" void effinfer_switch_stack(void** save, void* load);
#endif

namespace effinfer::cuda::host {

class Fiber {
 public:
  // Frames of unoptimised, instrumented kernels are large. Only what is touched takes memory. What
  // lies at most as far above a frame and is not the stack is nobody's: the detector of races
  // (races.cpp) takes all of it for the stack.
  static constexpr size_t kStackBytes = 256 << 10;

  // Stacks of fibers that have gone are used again.
  Fiber();
  ~Fiber();
  Fiber(Fiber&&) noexcept;

  // Makes it ready to run `entry`, which must end with leave().
  void start(void (*entry)());
  // The fiber that runs stops here until somebody switches to it.
  static void switch_to(Fiber& from, Fiber& to);
  // Asks the host's caches for what switching to it reads first.
  void prefetch() const {
#if defined(__x86_64__)
    constexpr int kLine = 64;
    constexpr int kLines = 6;
    const char* const first = static_cast<const char*>(stack_pointer_);
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(first + i * kLine, 1);
#endif
  }
  // The same for good.
  static void leave(Fiber& from, Fiber& to);
  // For one that has stopped and will never go on: what it did has happened for whoever calls
  // order_after(place). `is_unseen`: it stopped while an Unseen lived.
  void give_up(void* place, bool is_unseen);
  // The thread's own stack, which needs no start().
  static Fiber of_thread();

 private:
  struct Own {};
  struct State;
  explicit Fiber(Own);
  static void first();  // on a new fiber's stack
  static void jump(Fiber& from, Fiber& to, void** fake_stack);
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;  // while it does not run
#endif
  std::unique_ptr<State> state_;
};

#if defined(__x86_64__) && !defined(EFFINFER_ASAN) && !defined(EFFINFER_TSAN)
inline void Fiber::switch_to(Fiber& from, Fiber& to) {
  effinfer_switch_stack(&from.stack_pointer_, to.stack_pointer_);
}
#endif

// ThreadSanitizer, where the rest is built with it (EFFINFER_TSAN). What was done before
// order_before(place) has happened for whoever calls order_after(place) later.
#if defined(EFFINFER_TSAN)
void order_before(void* place);
void order_after(void* place);
// Accesses that the emulator makes for the fiber that runs.
void tell_read(const void* from, size_t bytes);
void tell_write(void* to, size_t bytes);
// Races that it has told of, in all threads.
int reported_races();
void begin_unseen();
void end_unseen();
#else
inline void order_before(void*) {}
inline void order_after(void*) {}
inline void tell_read(const void*, size_t) {}
inline void tell_write(void*, size_t) {}
inline int reported_races() {
  return 0;
}
inline void begin_unseen() {}
inline void end_unseen() {}
#endif
// While it lives the accesses of this fiber are the machine's and nobody's.
class Unseen {
 public:
  Unseen() { begin_unseen(); }
  ~Unseen() { end_unseen(); }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};

// AddressSanitizer: who touches poisoned memory is told on.
void poison(const void* from, size_t bytes);
void unpoison(const void* from, size_t bytes);

}  // namespace effinfer::cuda::host
