// Never built with -fsanitize=thread (EFFINFER_TSAN says that the rest is): what happens here is
// the machine and not the program.
#include "gpu/fiber.h"

#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(EFFINFER_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* place);
void __tsan_release(void* place);
void __tsan_read_range(void* from, unsigned long bytes);
void __tsan_write_range(void* to, unsigned long bytes);
}
#else
namespace {
void* __tsan_get_current_fiber() {
  return nullptr;
}
void* __tsan_create_fiber(unsigned) {
  return nullptr;
}
void __tsan_destroy_fiber(void*) {}
void __tsan_switch_to_fiber(void*, unsigned) {}
void __tsan_acquire(void*) {}
void __tsan_release(void*) {}
void __tsan_read_range(void*, unsigned long) {}
void __tsan_write_range(void*, unsigned long) {}
}  // namespace
#endif

#if defined(__x86_64__)
// Keeps the registers that a call must preserve and the stack pointer in *save, and takes the
// others' from `load`. swapcontext() also asks the kernel for the signal mask, which costs a
// hundred times as much.
extern "C" void effinfer_switch_stack(void** save, void* load);
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

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kOrdersNothing = 1;

}  // namespace

struct Fiber::State {
  std::unique_ptr<char[]> stack;
  void* tsan = nullptr;
  bool owns_tsan = false;
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

Fiber::Fiber() : state_(std::make_unique<State>()) {
  state_->stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
}

Fiber::Fiber(Own) : state_(std::make_unique<State>()) {}

Fiber::Fiber(Fiber&&) noexcept = default;

Fiber::~Fiber() {
  if (state_ && state_->owns_tsan) __tsan_destroy_fiber(state_->tsan);
}

Fiber Fiber::of_thread() {
  Fiber fiber{Own{}};
  fiber.state_->tsan = __tsan_get_current_fiber();
  return fiber;
}

void Fiber::start(void (*entry)()) {
  State& state = *state_;
  if (state.owns_tsan) __tsan_destroy_fiber(state.tsan);
  state.tsan = __tsan_create_fiber(0);
  state.owns_tsan = true;
#if defined(__x86_64__)
  // As a call leaves it: the address to go to on top of six registers, and a stack pointer that is
  // 8 beyond a multiple of 16 at the entry.
  const auto end = reinterpret_cast<uintptr_t>(state.stack.get()) + kStackBytes;
  auto** top = reinterpret_cast<void**>(end & ~uintptr_t{15}) - 2;
  *top = reinterpret_cast<void*>(entry);
  state.stack_pointer = top - 6;
#else
  getcontext(&state.context);
  state.context.uc_stack.ss_sp = state.stack.get();
  state.context.uc_stack.ss_size = kStackBytes;
  state.context.uc_link = nullptr;
  makecontext(&state.context, entry, 0);
#endif
}

void Fiber::switch_to(Fiber& from, Fiber& to) {
  __tsan_switch_to_fiber(to.state_->tsan, kOrdersNothing);
#if defined(__x86_64__)
  effinfer_switch_stack(&from.state_->stack_pointer, to.state_->stack_pointer);
#else
  swapcontext(&from.state_->context, &to.state_->context);
#endif
}

void order_before(void* place) {
  __tsan_release(place);
}
void order_after(void* place) {
  __tsan_acquire(place);
}
void count_read(const void* from, size_t bytes) {
  __tsan_read_range(const_cast<void*>(from), bytes);
}
void count_write(void* to, size_t bytes) {
  __tsan_write_range(to, bytes);
}

}  // namespace effinfer::cuda::host
