// Never built with -fsanitize=thread (EFFINFER_TSAN says that the rest is): what happens here is
// the machine and not the program.
#include "gpu/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

extern "C" {
#if defined(EFFINFER_TSAN)
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* place);
void __tsan_release(void* place);
void __tsan_read_range(void* from, unsigned long bytes);
void __tsan_write_range(void* to, unsigned long bytes);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
#endif
#if defined(EFFINFER_ASAN)
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
void __asan_poison_memory_region(const volatile void* from, size_t bytes);
void __asan_unpoison_memory_region(const volatile void* from, size_t bytes);
#endif
}

namespace {
#if !defined(EFFINFER_TSAN)
void* __tsan_get_current_fiber() {
  return nullptr;
}
void* __tsan_create_fiber(unsigned) {
  return nullptr;
}
void __tsan_destroy_fiber(void*) {}
void __tsan_switch_to_fiber(void*, unsigned) {}
void __tsan_release(void*) {}
#endif
#if !defined(EFFINFER_ASAN)
void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
void __asan_poison_memory_region(const volatile void*, size_t) {}
void __asan_unpoison_memory_region(const volatile void*, size_t) {}
#endif
}  // namespace

#if defined(EFFINFER_TSAN)
static std::atomic<int> races = 0;
extern "C" {
// ThreadSanitizer calls it with each report.
[[gnu::visibility("default")]] void __tsan_on_report(void*) {
  ++races;
}
// It would sleep for a second before each exit, also of a child.
[[gnu::visibility("default")]] const char* __tsan_default_options() {
  return "atexit_sleep_ms=0";
}
}
#endif

#if defined(__x86_64__)
asm(R"(
  .text
  .globl effinfer_switch_stack
effinfer_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#endif

namespace effinfer::cuda::host {
namespace {

constexpr size_t kStackBytes = Fiber::kStackBytes;
constexpr unsigned kOrdersNothing = 1;
constexpr size_t kLine = 64;
constexpr size_t kFirstFrames = 16 << 10;  // of first() and its entry

// Each lies between a page and as much as a stack that nobody may touch. Where fibers begin differs
// within a page, as the lines of a cache that they may be in follow from the address there.
class Stacks {
 public:
  // Its first byte and where a fiber begins.
  struct Stack {
    void* bottom;
    void* top;
  };
  Stack take() {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      const Stack stack = spare_.back();
      spare_.pop_back();
      return stack;
    }
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* base = mmap(nullptr, page + 2 * kStackBytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    char* const bottom = static_cast<char*>(base) + page;
    if (mprotect(bottom, kStackBytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    return {bottom, bottom + kStackBytes - made_++ * kStep % page};
  }
  void give(const Stack& stack) {
    const std::lock_guard lock(mutex_);
    spare_.push_back(stack);
  }

 private:
  static constexpr size_t kStep = 11 * kLine;
  std::mutex mutex_;
  std::vector<Stack> spare_;
  size_t made_ = 0;
};

Stacks& stacks() {
  static auto* all = new Stacks;
  return *all;
}

}  // namespace

struct Fiber::State {
#if !defined(__x86_64__)
  ucontext_t context;
#endif
  void (*entry)() = nullptr;
  Stacks::Stack stack{};  // to be given back
  // For AddressSanitizer; those of the thread's own stack it tells when another fiber first runs.
  const void* bottom = nullptr;
  size_t size = 0;
  bool has_left = false;
  void* fake_stack = nullptr;
  // Made once for all that a fiber runs, as it takes 100 us. None is left when no launch runs:
  // ThreadSanitizer gives up on processes that fork while there are threads.
  void* tsan = nullptr;

  static thread_local State* left;     // the last one that stopped
  static thread_local State* running;  // the one that runs instead
  static void arrive() {
    __sanitizer_finish_switch_fiber(running->fake_stack, &left->bottom, &left->size);
  }
};

thread_local Fiber::State* Fiber::State::left = nullptr;
thread_local Fiber::State* Fiber::State::running = nullptr;

Fiber::Fiber() : state_(std::make_unique<State>()) {
  state_->stack = stacks().take();
  state_->bottom = state_->stack.bottom;
  state_->size = kStackBytes;
}

Fiber::Fiber(Own) : state_(std::make_unique<State>()) {}

Fiber::Fiber(Fiber&&) noexcept = default;

Fiber::~Fiber() {
  if (!state_ || state_->stack.bottom == nullptr) return;
  if (state_->tsan != nullptr) __tsan_destroy_fiber(state_->tsan);
  stacks().give(state_->stack);
}

Fiber Fiber::of_thread() {
  Fiber fiber{Own{}};
  fiber.state_->tsan = __tsan_get_current_fiber();
  return fiber;
}

void Fiber::first() {
  State::arrive();
  State::running->entry();
}

void Fiber::start(void (*entry)()) {
  State& state = *state_;
  if (state.tsan == nullptr) state.tsan = __tsan_create_fiber(0);
  state.entry = entry;
  state.fake_stack = nullptr;
  // Frames that an earlier fiber never left: its first ones, or all.
  char* const top = static_cast<char*>(state.stack.top);
  char* const last = std::exchange(state.has_left, false) ? top - kFirstFrames
                                                          : static_cast<char*>(state.stack.bottom);
  __asan_unpoison_memory_region(last, static_cast<size_t>(top - last));
#if defined(__x86_64__)
  // As a call leaves it: six registers, the address to go to, and above them what would be the
  // address to return to, 8 beyond a multiple of 16. Zeros end a debugger's walk.
  constexpr size_t kRegisters = 6;
  auto** first = reinterpret_cast<void**>(top) - 2;
  std::fill(first - kRegisters, first + 2, nullptr);
#if defined(EFFINFER_ASAN) || defined(EFFINFER_TSAN)
  *first = reinterpret_cast<void*>(&Fiber::first);
#else
  *first = reinterpret_cast<void*>(entry);
#endif
  stack_pointer_ = first - kRegisters;
#else
  getcontext(&state.context);
  state.context.uc_stack.ss_sp = state.stack.bottom;
  state.context.uc_stack.ss_size =
      static_cast<size_t>(top - static_cast<char*>(state.stack.bottom));
  state.context.uc_link = nullptr;
  makecontext(&state.context, &Fiber::first, 0);
#endif
}

void Fiber::jump(Fiber& from, Fiber& to, void** fake_stack) {
  State::left = from.state_.get();
  State::running = to.state_.get();
  __tsan_switch_to_fiber(to.state_->tsan, kOrdersNothing);
  __sanitizer_start_switch_fiber(fake_stack, to.state_->bottom, to.state_->size);
#if defined(__x86_64__)
  effinfer_switch_stack(&from.stack_pointer_, to.stack_pointer_);
#else
  swapcontext(&from.state_->context, &to.state_->context);
#endif
}

#if !defined(__x86_64__) || defined(EFFINFER_ASAN) || defined(EFFINFER_TSAN)
void Fiber::switch_to(Fiber& from, Fiber& to) {
  jump(from, to, &from.state_->fake_stack);
  State::arrive();
}
#endif

void Fiber::leave(Fiber& from, Fiber& to) {
  from.state_->has_left = true;
  jump(from, to, nullptr);
}

void Fiber::give_up(void* place, bool is_unseen) {
  void* const here = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(state_->tsan, kOrdersNothing);
  __tsan_release(place);
  if (is_unseen) end_unseen();
  __tsan_switch_to_fiber(here, kOrdersNothing);
  __tsan_destroy_fiber(std::exchange(state_->tsan, nullptr));  // calls have no end there
}

#if defined(EFFINFER_TSAN)
void order_before(void* place) {
  __tsan_release(place);
}
void order_after(void* place) {
  __tsan_acquire(place);
}
void tell_read(const void* from, size_t bytes) {
  __tsan_read_range(const_cast<void*>(from), bytes);
}
void tell_write(void* to, size_t bytes) {
  __tsan_write_range(to, bytes);
}
int reported_races() {
  return races;
}
void begin_unseen() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
void end_unseen() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
#endif

void poison(const void* from, size_t bytes) {
  __asan_poison_memory_region(from, bytes);
}
void unpoison(const void* from, size_t bytes) {
  __asan_unpoison_memory_region(from, bytes);
}

}  // namespace effinfer::cuda::host
