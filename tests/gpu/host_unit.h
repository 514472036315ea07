// A GPU on the host, for tests: every thread of a block is a fiber, and what threads of a warp or a
// block do together is a rendezvous, to which each brings its operands and where the last to come
// does the work for all. Which fiber runs next is drawn from a seed, asynchronous copies land as
// late as they may, shared memory is NaN before a block, and what is undefined on a GPU throws
// std::logic_error: a collective that not all threads reach, two different ones that meet, a copy
// that is not aligned.
//
// Blocks run one after the other, in an order drawn from the seed, so a block must not wait for
// another. The order of memory between blocks is not modelled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "core/backend.h"
#include "cuda/unit.h"

namespace effinfer::cuda::host {

class Block;

// One thread of a block, with the names of DeviceUnit.
class Unit {
 public:
  int thread = 0;
  int lane = 0;
  int warp = 0;
  int block = 0;
  int num_blocks = 0;

  void sync() { meet(Group::block, "sync", nullptr, nullptr); }
  void sync_warp() { meet(Group::warp, "sync_warp", nullptr, nullptr); }

  template <class T>
  T shfl(T value, int from) {
    struct Slot {
      T in;
      T out;
      int from;
    } slot{value, {}, from};
    meet(Group::warp, "shfl", &slot, [](void** all) {
      for (int i = 0; i < kWarp; ++i) {
        auto* mine = static_cast<Slot*>(all[i]);
        mine->out = static_cast<Slot*>(all[mine->from % kWarp])->in;
      }
    });
    return slot.out;
  }
  template <class T>
  T shfl_xor(T value, int mask) {
    return shfl(value, lane ^ mask);
  }
  uint32_t ballot(bool value);

  void copy_async(void* to, const void* from, bool valid = true);
  void commit();
  template <int kPending>
  void wait() {
    wait_for(kPending);
  }

  void ldmatrix(uint32_t (&out)[4], const void* row);
  void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
  void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
  void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

  template <class T>
  T load(const T* pointer) {
    require_aligned(pointer, alignof(T), "load");
    return *pointer;
  }
  template <class T>
  T load_once(const T* pointer) {
    return load(pointer);
  }
  template <class T>
  T atomic_add(T* pointer, T value) {
    return __atomic_fetch_add(pointer, value, __ATOMIC_RELAXED);
  }
  void fence() {}
  uint32_t bf16x2(float low, float high);
  uint32_t f16x2(float low, float high);
  uint32_t add_bf16x2(uint32_t a, uint32_t b);

 private:
  friend class Block;
  enum class Group : uint8_t { warp, block };
  using Work = void (*)(void** operands);
  void meet(Group group, const char* what, void* operand, Work work);
  void wait_for(int pending);
  static void require_aligned(const void* pointer, size_t alignment, const char* what);

  Block* owner_ = nullptr;
};

// What a launch is to the emulator.
struct Grid {
  const char* name;
  int threads;
  int64_t blocks;
  size_t shared_bytes;
  std::function<void(Unit&, void* shared)> kernel;
};

// Runs a grid now. The host's pointers are the device's.
void run(const Grid& grid, uint64_t seed);

// Puts a grid into a queue of the emulated device (host_backend.cpp), which runs it when somebody
// waits.
void enqueue(Grid grid, Queue& queue);

template <class Kernel>
Grid grid_of(const typename Kernel::Params& params, int64_t blocks) {
  static_assert(sizeof(params) <= 4096 && Kernel::kThreads % kWarp == 0);
  using Shared = typename Kernel::Shared;
  return {Kernel::kName, Kernel::kThreads, blocks, sizeof(Shared),
          [params](Unit& unit, void* shared) {
            Kernel::run(unit, params, *static_cast<Shared*>(shared));
          }};
}

template <class Kernel>
void enqueue(const typename Kernel::Params& params, int64_t blocks, Queue& queue) {
  enqueue(grid_of<Kernel>(params, blocks), queue);
}

}  // namespace effinfer::cuda::host
