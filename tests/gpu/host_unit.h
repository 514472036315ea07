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

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "core/backend.h"
#include "cuda/unit.h"
#include "gpu/observer.h"

namespace effinfer::cuda::host {

class Block;
struct WarpWgmma;

// One thread of a block, with the names of DeviceUnit.
int arch();

class Unit {
 public:
  int thread = 0;
  int lane = 0;
  int warp = 0;
  int block = 0;
  int num_blocks = 0;

  Unit anew() const { return *this; }

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
  uint32_t same(uint32_t value, Where where = Where::current()) {
    const uint32_t first = shfl(value, 0, where);
    require(first == value, "same", "expected a number that all of the warp have");
    return first;
  }
  uint32_t ballot(bool value, Where where = Where::current());

  void copy_async(void* to, const void* from, bool valid = true);
  void copy_async_if(bool does, void* to, const void* from);
  void commit(Where where = Where::current());
  template <int kPending>
  void wait(Where where = Where::current()) {
    wait_for(kPending, where);
  }

  void ldmatrix(uint32_t (&out)[4], const void* row, Where where = Where::current());
  void ldmatrix_transposed(uint32_t (&out)[4], const void* row, Where where = Where::current());
  void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
           Where where = Where::current());
  void mma_first(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                 Where where = Where::current());
  void mma_onto(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4],
                Where where = Where::current());
  void wait_for_inputs();
  void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
               Where where = Where::current());
  void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
              Where where = Where::current());

  template <class T>
  T load(const T* pointer) {
    begin_load(pointer, sizeof(T), alignof(T));
    return *pointer;
  }
  template <class T>
  T load_written(const T* pointer) {
    require_global(pointer, alignof(T), "load_written");
    return *pointer;
  }
  template <class T>
  T load_once(const T* pointer) {
    return load(pointer);
  }
  void prefetch(const void* from, int bytes, Where where = Where::current());
  template <class T>
  T atomic_add(T* pointer, T value) {
    require_global(pointer, alignof(T), "atomic_add");
    count_atomic();
    return std::atomic_ref<T>(*pointer).fetch_add(value, std::memory_order_relaxed);
  }
  void add_shared(uint32_t* pointer, uint32_t value);
  void add_global(uint64_t* pointer, uint64_t value);
  void fence(Where where = Where::current());
  uint32_t bf16x2(float low, float high);
  uint32_t f16x2(float low, float high);
  float from_f16(uint16_t bits);
  float mul(float a, float b) { return a * b; }
  uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c);
  uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c);
  float exp2(float x);
  float reciprocal(float x);
  uint32_t permute(uint32_t a, uint32_t b, uint32_t picks);
  int popcount(uint32_t bits) { return std::popcount(bits); }
  int lowest_bit(uint32_t bits) { return std::countr_zero(bits); }
  uint32_t rotate(uint32_t word, int bits) { return std::rotl(word, bits); }
  template <class T>
  static T kept(T value) {
    return value;
  }
  template <class T>
  static T* kept_shared(T* pointer) {
    return pointer;
  }

  void sync_some(int id, int threads, Where where = Where::current());
  void arrive_some(int id, int threads, Where where = Where::current());

  // --- Hopper

  static bool has_bulk_copies() { return arch() == 90; }
  void barrier_init(Mbarrier& barrier, int count);
  void barrier_arrive(Mbarrier& barrier, Where where = Where::current());
  void barrier_arrive_expect(Mbarrier& barrier, int bytes, Where where = Where::current());
  void barrier_wait(Mbarrier& barrier, int parity, Where where = Where::current());
  void copy_bulk(void* to, const void* from, int bytes, Mbarrier& barrier);
  void copy_tile(void* to, const TensorMap& map, int col, int row, Mbarrier& barrier);
  void fence_async(Where where = Where::current());

  uint64_t descriptor(const void* first, int leading, int stride, Swizzle swizzle) const;
  template <bool kTransposed = false, int kSums>
  void wgmma(float (&d)[kSums], uint32_t (&a)[4], uint64_t b, bool adds = true,
             Where where = Where::current()) {
    issue({d, kSums, a, 0, b, false, false, kTransposed, adds}, where);
  }
  template <bool kTransposedA = false, bool kTransposed = false, int kSums>
  void wgmma(float (&d)[kSums], uint64_t a, uint64_t b, bool adds = true,
             Where where = Where::current()) {
    issue({d, kSums, nullptr, a, b, false, kTransposedA, kTransposed, adds}, where);
  }
  template <bool kTransposed = false, int kSums>
  void wgmma_f16(float (&d)[kSums], uint32_t (&a)[4], uint64_t b, bool adds = true,
                 Where where = Where::current()) {
    issue({d, kSums, a, 0, b, true, false, kTransposed, adds}, where);
  }
  template <bool kTransposedA = false, bool kTransposed = false, int kSums>
  void wgmma_f16(float (&d)[kSums], uint64_t a, uint64_t b, bool adds = true,
                 Where where = Where::current()) {
    issue({d, kSums, nullptr, a, b, true, kTransposedA, kTransposed, adds}, where);
  }
  // The place of the call has no room behind a pack of arguments: it comes with the first of them.
  struct Named {
    std::span<unsigned char> bytes;
    Where where;
    template <class T, size_t kCount>
    Named(T (&registers)[kCount], Where here = Where::current())
        : bytes(reinterpret_cast<unsigned char*>(registers), sizeof registers), where(here) {}
  };
  template <class... More>
  void wgmma_fence(Named first, More&... more) {
    fence_registers(first.where, {first, more...});
  }
  void wgmma_commit(Where where = Where::current());
  template <int kPending>
  void wgmma_wait(Where where = Where::current()) {
    wait_for_wgmma(kPending, where, {});
  }
  template <int kPending, class... More>
  void wgmma_wait(Named first, More&... more) {
    wait_for_wgmma(kPending, first.where, {first, more...});
  }
  template <int kCount>
  void take_registers(Where where = Where::current()) {
    change_registers(kCount, true, where);
  }
  template <int kCount>
  void give_registers(Where where = Where::current()) {
    change_registers(kCount, false, where);
  }

  // A wgmma of one thread.
  struct Wgmma {
    float* d;
    int sums;
    uint32_t* a;  // or null, and
    uint64_t a_tile;
    uint64_t b_tile;
    bool is_f16;
    bool transposed_a;
    bool transposed;
    bool adds;
  };

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
  void require_hopper(const char* what) const;
  void arrive(Mbarrier& barrier, int bytes, const char* what);
  void issue(const Wgmma& mine, Where where);
  using NamedRegisters = std::array<unsigned char*, 8>;  // no memory that a fiber may leave behind
  void begin_wgmma(WarpWgmma& op, unsigned line);
  void end_wgmma(int pending, const std::array<const NamedRegisters*, kWarp>& named);
  void tell_tiles(const WarpWgmma& op) const;
  void fence_registers(Where where, std::initializer_list<Named> registers);
  void wait_for_wgmma(int pending, Where where, std::initializer_list<Named> registers);
  void change_registers(int count, bool more, Where where);
  void begin_load(const void* pointer, size_t bytes, size_t alignment);
  void tell_add(void* pointer, size_t bytes);
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
  int arch;        // that it asks for or adapts to, or 0
  int min_blocks;  // of a multiprocessor, or 0
  bool waits_itself;
  std::vector<char> params;
  void (*kernel)(Unit&, const void* params, void* shared);
};

// Compute capability of the emulated device, which tests may change. Kernels that ask for one run
// on no other.
int arch();
void set_arch(int arch);
// The shared memory that a block may have there, and which tests may change, too.
int64_t shared_bytes();
void set_shared_bytes(int64_t bytes);

// Its multiprocessors: 132, as an H100 has, unless a test says otherwise.
int multiprocessors();
void set_multiprocessors(int count);

// Runs a grid now. The host's pointers are the device's.
void run(const Grid& grid, uint64_t seed);
// Grids from now on begin when those before have ended, as behind a copy or somebody's wait.
void end_of_grids();

// Puts a grid into a queue of the emulated device (host_backend.cpp), which runs it when somebody
// waits.
void enqueue(Grid grid, Queue& queue);

template <class Kernel>
Grid grid_of(const typename Kernel::Params& params, int64_t blocks,
             size_t shared = sizeof(typename Kernel::Shared), int threads = Kernel::kThreads) {
  using Params = typename Kernel::Params;
  using Shared = typename Kernel::Shared;
  static_assert(sizeof(Params) <= Grid::kMostParams && Kernel::kThreads % kWarp == 0);
  static_assert(std::is_trivially_copyable_v<Params>);
  const auto* bytes = reinterpret_cast<const char*>(&params);
  int min_blocks = 0;
  if constexpr (requires { Kernel::kMinBlocks; }) min_blocks = Kernel::kMinBlocks;
  if (threads <= 0 || threads > Kernel::kThreads || threads % kWarp != 0) {
    throw std::logic_error("[" + std::string(Kernel::kName) + "] expected whole warps, at most " +
                           std::to_string(Kernel::kThreads) + " threads, got " +
                           std::to_string(threads));
  }
  int arch_asked = required_arch<Kernel>();
  if constexpr (requires { Kernel::kAdapts; }) arch_asked = arch();
  return {Kernel::kName,
          threads,
          blocks,
          shared,
          arch_asked,
          min_blocks,
          requires { Kernel::kWaitsItself; },
          {bytes, bytes + sizeof(Params)},
          [](Unit& unit, const void* own, void* memory) {
            Kernel::run(unit, *static_cast<const Params*>(own), *static_cast<Shared*>(memory));
          }};
}

template <class Kernel>
void enqueue(const typename Kernel::Params& params, int64_t blocks, Queue& queue,
             size_t shared = sizeof(typename Kernel::Shared), int threads = Kernel::kThreads) {
  if (required_arch<Kernel>() == 0 && !runs_on<Kernel>(arch())) {
    throw std::logic_error("[" + std::string(Kernel::kName) +
                           "] expected a GPU without a kernel that replaces it, this one has " +
                           std::to_string(arch()));
  }
  enqueue(grid_of<Kernel>(params, blocks, shared, threads), queue);
}

// --- leaving barriers out (mutations.h) ----------------------------------------------------------

// A call of what orders others: sync, commit, wait, fence, barrier_arrive, wgmma_wait, ...
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

// --- what kernels prefetch -----------------------------------------------------------------------

struct Prefetched {
  std::string kernel;
  const std::byte* from = nullptr;
  int64_t bytes = 0;
  auto operator<=>(const Prefetched&) const = default;
};

// What launches of this process ask for from now on, until taken.
void record_prefetches();
std::vector<Prefetched> recorded_prefetches();

}  // namespace effinfer::cuda::host
