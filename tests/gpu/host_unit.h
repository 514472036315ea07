// A GPU on the host, for tests: every thread of a block is a fiber, and what threads of a warp or a
// block do together is a rendezvous, to which each brings its operands and where the last to come
// does the work for all. Which fiber runs next is drawn from a seed, asynchronous copies land as
// late as they may, shared memory is NaN before a block, and what is undefined on a GPU throws
// std::logic_error: a collective that not all threads reach or reach from different lines, a copy
// that is not aligned, memory of the wrong kind.
//
// Blocks run one after the other, in an order drawn from the seed, so a block must not wait for
// another.
//
// What orders memory: sync() and sync_warp(), not shuffles; between blocks a fence() before an
// atomic_add() and, in the block that reads, one after it. ThreadSanitizer and the detector of
// races.cpp believe nothing else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <source_location>
#include <string>
#include <type_traits>
#include <vector>

#include "core/backend.h"
#include "cuda/unit.h"

namespace effinfer::cuda::host {

class Block;

// A call in a kernel's source.
using Where = std::source_location;

// One thread of a block, with the names of DeviceUnit.
class Unit {
 public:
  int thread = 0;
  int lane = 0;
  int warp = 0;
  int block = 0;
  int num_blocks = 0;

  void sync(Where where = Where::current());
  void sync_warp(Where where = Where::current());
  void keep_order() {}

  template <class T>
  T shfl(T value, int from, Where where = Where::current()) {
    return shuffled(value, from, "shfl", where);
  }
  template <class T>
  T shfl_xor(T value, int mask, Where where = Where::current()) {
    require(mask >= 0 && mask < kWarp, "shfl_xor", "expected a mask from 0 to 31");
    return shuffled(value, lane ^ mask, "shfl_xor", where);
  }
  uint32_t ballot(bool value, Where where = Where::current());

  void copy_async(void* to, const void* from, bool valid = true);
  void commit(Where where = Where::current());
  template <int kPending>
  void wait(Where where = Where::current()) {
    wait_for(kPending, where);
  }

  void ldmatrix(uint32_t (&out)[4], const void* row, Where where = Where::current());
  void ldmatrix_transposed(uint32_t (&out)[4], const void* row, Where where = Where::current());
  void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
           Where where = Where::current());
  void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
               Where where = Where::current());
  void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
              Where where = Where::current());

  template <class T>
  T load(const T* pointer) {
    require_global(pointer, alignof(T), "load");
    tell_load(pointer, sizeof(T));
    return *pointer;
  }
  template <class T>
  T load_once(const T* pointer) {
    return load(pointer);
  }
  template <class T>
  T atomic_add(T* pointer, T value) {
    require_global(pointer, alignof(T), "atomic_add");
    count_atomic();
    return std::atomic_ref<T>(*pointer).fetch_add(value, std::memory_order_relaxed);
  }
  void fence(Where where = Where::current());
  uint32_t bf16x2(float low, float high);
  uint32_t f16x2(float low, float high);
  float from_f16(uint16_t bits);
  float mul(float a, float b) { return a * b; }
  uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c);
  float exp2(float x);
  float reciprocal(float x);
  uint32_t permute(uint32_t a, uint32_t b, uint32_t picks);

 private:
  friend class Block;
  using Work = void (*)(void** operands);

  template <class T>
  T shuffled(T value, int from, const char* what, Where where) {
    static_assert(std::is_trivially_copyable_v<T>);
    T out;
    shuffle(&value, &out, sizeof(T), from, what, where);
    return out;
  }
  // Whether this call is left out.
  bool passes(const char* what, const Where& where);
  void shuffle(const void* in, void* out, size_t bytes, int from, const char* what, Where where);
  void wait_for(int pending, Where where);
  void load_matrices(uint32_t (&out)[4], const void* row, bool transposed, Where where);
  void tell_load(const void* pointer, size_t bytes);
  void count_atomic();
  void require_global(const void* pointer, size_t alignment, const char* what) const {
    require(!in_shared(pointer), what, "expected an address in global memory");
    require_aligned(pointer, alignment, what);
  }
  void require_shared(const void* pointer, size_t bytes, const char* what) const;
  static void require_aligned(const void* pointer, size_t alignment, const char* what) {
    require(reinterpret_cast<uintptr_t>(pointer) % alignment == 0, what,
            "expected an address that is a multiple of its size");
  }
  static void require(bool condition, const char* what, const char* message) {
    if (!condition) refuse(what, message);
  }
  [[noreturn]] static void refuse(const char* what, const char* message);
  bool in_shared(const void* pointer) const {
    return static_cast<const char*>(pointer) - shared_ >= 0 &&
           static_cast<size_t>(static_cast<const char*>(pointer) - shared_) < shared_bytes_;
  }

  Block* owner_ = nullptr;
  const char* shared_ = nullptr;
  size_t shared_bytes_ = 0;
};

// What a launch is to the emulator.
struct Grid {
  static constexpr size_t kMostParams = 4096;

  const char* name;
  int threads;
  int64_t blocks;
  size_t shared_bytes;
  std::vector<char> params;
  void (*kernel)(Unit&, const void* params, void* shared);
};

// Runs a grid now. The host's pointers are the device's.
void run(const Grid& grid, uint64_t seed);

// Puts a grid into a queue of the emulated device (host_backend.cpp), which runs it when somebody
// waits.
void enqueue(Grid grid, Queue& queue);

template <class Kernel>
Grid grid_of(const typename Kernel::Params& params, int64_t blocks) {
  using Params = typename Kernel::Params;
  using Shared = typename Kernel::Shared;
  static_assert(sizeof(Params) <= Grid::kMostParams && Kernel::kThreads % kWarp == 0);
  static_assert(std::is_trivially_copyable_v<Params>);
  const auto* bytes = reinterpret_cast<const char*>(&params);
  return {Kernel::kName,
          Kernel::kThreads,
          blocks,
          sizeof(Shared),
          {bytes, bytes + sizeof(Params)},
          [](Unit& unit, const void* own, void* shared) {
            Kernel::run(unit, *static_cast<const Params*>(own), *static_cast<Shared*>(shared));
          }};
}

template <class Kernel>
void enqueue(const typename Kernel::Params& params, int64_t blocks, Queue& queue) {
  enqueue(grid_of<Kernel>(params, blocks), queue);
}

// --- leaving barriers out (mutations.h) ----------------------------------------------------------

// A call of sync, sync_warp, commit, wait or fence.
struct Site {
  std::string file;
  unsigned line = 0;
  unsigned column = 0;
  std::string kernel;
  std::string what;
  auto operator<=>(const Site&) const = default;
};

// Those that launches of this process reach from now on, until recorded_sites().
void record_sites();
std::set<Site> recorded_sites();
// From now on all threads of its kernel pass it as if it were not there.
void ignore_site(const Site& site);

// --- watching what threads do (races.cpp)
// ----------------------------------------------------------

// How far a thread is.
struct Progress {
  int thread = 0;
  uint32_t syncs = 0;       // barriers of the block that it has left behind
  uint32_t warp_syncs = 0;  // of the warp
  uint32_t fences = 0;
  uint32_t fence_syncs = 0;   // `syncs` at its last fence
  bool has_fenced = false;    // and no atomic_add of the block has followed yet
  bool has_added = false;     // atomically
  bool has_acquired = false;  // by a fence after an atomic_add
};

// Cycles that shared memory was busy, and how many would have been enough for any layout of what
// was accessed.
struct Banks {
  uint64_t cycles = 0;
  uint64_t least = 0;
  std::string worst;  // the instruction that most of the others are for
};

// Of the host's thread that runs a launch.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void launch_begins(const Grid& grid) = 0;
  virtual void block_begins(const void* shared, size_t bytes) = 0;
  // Whose loads and stores follow; null: nobody's.
  virtual void resumes(const Progress* thread) = 0;
  virtual void passes_sync(uint32_t syncs, const Where& where) = 0;
  // Others that acquire see what came before the thread's last fence; it sees what they released.
  virtual void releases(const Progress& thread) = 0;
  virtual void acquires(const Progress& thread) = 0;
  virtual void reads(const Progress& thread, const void* from, size_t bytes) = 0;
  // As load() does: through a cache that does not see what this launch writes.
  virtual void loads(const Progress& thread, const void* from, size_t bytes) = 0;
  virtual void begins_copy(const Progress& thread, void* to, size_t bytes) = 0;
  virtual void ends_copy(const Progress& thread, void* to, size_t bytes) = 0;
  virtual void block_ends() = 0;
  // What was wrong since the launch began, or nothing.
  virtual std::string complaint() = 0;
  // Of what follows, until taken.
  virtual void count_banks() = 0;
  virtual Banks take_banks() = 0;
};

// Each thread of the host has its own. Without any nobody watches.
void set_observer(Observer& (*of_this_thread)());
// Which are seen in kernels of this program: in this way, or by ThreadSanitizer, for which blocks
// are ordered.
enum class Races : uint8_t { none, of_block, all };
Races detected_races();

// Of the launches in `body`. Zeros where not all races are detected.
Banks count_banks(const std::function<void()>& body);

}  // namespace effinfer::cuda::host
