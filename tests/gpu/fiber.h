// Fibers: stacks that one thread switches between. ThreadSanitizer is told of each; that one runs
// after another orders nothing for it, only order_after() and order_before() do.
#pragma once

#include <cstddef>
#include <memory>

namespace effinfer::cuda::host {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(Fiber&&) noexcept;

  // Makes it ready to run `entry`, which must end with a switch to another fiber.
  void start(void (*entry)());
  // The fiber that runs stops here until somebody switches to it.
  static void switch_to(Fiber& from, Fiber& to);
  // The thread's own stack, which needs no start().
  static Fiber of_thread();

 private:
  struct Own {};
  explicit Fiber(Own);
  struct State;
  std::unique_ptr<State> state_;
};

// What was done before order_before(place) has happened for whoever calls order_after(place) later.
void order_before(void* place);
void order_after(void* place);
// Accesses that the emulator makes for the fiber that runs.
void count_read(const void* from, size_t bytes);
void count_write(void* to, size_t bytes);

}  // namespace effinfer::cuda::host
