// What kernels are written in, for GPUs and for the emulator of the tests alike.
//
// A kernel is a struct of static members:
//
//   struct Add {
//     static constexpr const char* kName = "add";   // in errors and profiles
//     static constexpr int kThreads = 128;          // of a block: whole warps of 32
//     static constexpr int kMinBlocks = 2;          // optional: that an SM is to hold at once
//     static constexpr int kArch = 90;              // optional: runs on no other GPU
//     static constexpr bool kAdapts = true;         // optional: takes what the GPU has, see below
//     using Params = ...;                           // a POD, at most 4 KB, copied to each block
//     struct Shared { ... };                        // of a block; its contents are undefined
//     template <class Unit>
//     EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared);
//   };
//
// and runs as launch<Add>(params, blocks, queue) (entry.h). A Unit is one thread of a block:
//
//   thread, lane, warp      in the block, in its warp, which warp; block, num_blocks: of the grid
//   anew()                  the same thread, of whose numbers compilers know nothing: what follows
//                           from them is found where it is used, and in no register before
//   sync(), sync_warp()     a barrier of the block, of the warp
//   keep_order()            compilers do not move loads of shared memory across it, which would
//                           take registers; it orders nothing for other threads. All of a warp
//                           call it
//   shfl_xor(value, mask)   the value of lane ^ mask; shfl(value, lane): of that lane
//   ballot(bool)            a bit for each lane
//   same(n)                 n, which all of the warp have: what follows from it is found once for
//                           all, beside the instructions of lanes
//   copy_async(to, from, valid)   16 aligned bytes of global memory into shared memory, zeros where
//                                 not `valid`; they are there after commit() and a wait<n>() that
//                                 leaves at most the n newest groups under way, and for other
//                                 threads after a barrier that follows it; copy_async_if(does,
//                                 to, from): where it does, without a branch
//   ldmatrix(out, row)      four 8 x 8 matrices of 16-bit numbers from shared memory;
//                           ldmatrix_transposed: each with its rows for columns
//   wait_for_inputs()       what the kernel before wrote is there. The caller of a kernel has
//                           called it, unless the kernel says kWaitsItself: then each thread calls
//                           it once at least, as the kernel after counts on that
//   mma(d, a, b)            d += a b: m16n8k16 of bfloat16, sums in float32; mma_first: d = a b,
//                           with the bits of a sum with zeros; mma_onto(d, a, b, c): d = a b + c;
//                           mma_f16 of float16;
//                           mma_s8: m16n8k32 of int8, sums in int32
//   load(pointer)           global memory that no kernel writes while this one runs; load_once():
//                           which nobody will read again soon, such as weights; load_written():
//                           what other blocks wrote before this one synchronised with them
//   prefetch(from, bytes)   asks for aligned multiples of 16 bytes of global memory, so that they
//                           come from the second cache to who reads them soon. Nothing waits for
//                           them, and no result depends on it. All of a warp ask for the same
//   atomic_add(pointer, n)  on global memory; returns what was there. fence() orders what a thread
//                           wrote to global memory before it against what it writes after it, for
//                           other blocks
//   add_shared(pointer, n)  to a word of shared memory, as others of the block may at once;
//                           add_global(): to 8 bytes of global memory, as other blocks may
//   bf16x2(low, high)       two floats rounded to nearest even; f16x2(low, high): as float16
//   from_f16(bits)          the float of a float16
//   mul(a, b)               the rounded product: no addition after it becomes one with it
//   fma_bf16x2(a, b, c)     a b + c of two bfloat16 each; fma_f16x2: of two float16
//   exp2(x), reciprocal(x)  2^x and 1 / x within a few units of the last place, in one instruction;
//                           subnormal numbers are 0
//   permute(a, b, picks)    byte i of the result is byte picks >> 4 i & 7 of the eight of a, b
//   popcount(bits)          how many of 32 are set; lowest_bit(bits): the first one that is, of
//                           some; rotate(word, bits): to the left, or by less than 0 to the right
//   kept(value)             the same, in a register: the compiler does not compute it again from
//                           what it came from; kept_shared(pointer): of shared memory
//
//   sync_some(id, n)        a barrier of n threads, whole warps; arrive_some(id, n) counts among
//                           them and goes on. Of each id from 1 to 15 one is under way at a time.
//                           For kernels that say kArch or kAdapts
//
// Hopper (compute capability 9.0) has more, for kernels that say `kArch = 90`, and for those that
// say kAdapts where has_bulk_copies():
//
//   barrier_init(b, n)      an Mbarrier in shared memory, of phases that end with n arrivals and
//                           with all the bytes that were announced. For others after a barrier, for
//                           copies after fence_async() too
//   barrier_arrive(b)       barrier_arrive_expect(b, bytes) announces bytes of copies as well
//   barrier_wait(b, parity) until the phase of that parity, which is 0 for the first one, is over
//   copy_bulk(to, from, bytes, b)   aligned multiples of 16 bytes of global memory, by one thread;
//                                   they are there for who has waited for the phase of b
//   copy_tile(to, map, col, row, b) the box of a TensorMap in the kernel's Params that starts
//                                   there, zeros beyond its ends, swizzled; `to` at multiples of
//                                   1024 bytes, of 128 where nothing is swizzled
//   fence_async()           what the thread wrote to shared memory is there for copies and wgmma
//   descriptor(...)         of a tile in shared memory, see Swizzle
//   wgmma(d, a, b, adds)    d = a b + (adds ? d : 0) by four warps together: m64nNk16 of bfloat16
//                           with N = 2 (numbers of d); a in registers, where each warp has the
//                           fragment of mma() of its 16 rows, or a descriptor as b. Columns 8 j of
//                           d are the sums of mma() from 4 j on. wgmma_f16: of float16
//   wgmma_fence(registers...)   before a wgmma, with those of its registers that the thread has
//                               written since the last one; the memory of the tiles is no part
//   wgmma_commit()          wgmma_wait<n>(registers...): until at most the n newest groups are
//                           under way, with the sums that are done; before that nobody touches d, a
//                           or the tiles
//   take_registers<n>(), give_registers<n>()   four warps together: each thread has n from now on.
//                           For kernels that say kMinBlocks
//
// All threads of a warp call the collectives (shuffles, ballot, ldmatrix, mma, wgmma..., sync_warp)
// together, those of a block sync(). A thread that has left the kernel takes part in nothing, so a
// kernel returns early only for whole blocks.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define EFFINFER_DEVICE __device__ __forceinline__
#define EFFINFER_UNROLL _Pragma("unroll")
#define EFFINFER_PRAGMA(text) _Pragma(#text)
#define EFFINFER_UNROLL_BY(count) EFFINFER_PRAGMA(unroll(count))
#define EFFINFER_NO_UNROLL _Pragma("unroll 1")
// Of a function that touches registers alone, whatever it is given, as nobody else sees them: the
// emulator, where they are memory, is not told of them.
#define EFFINFER_REGISTERS
#else
#define EFFINFER_DEVICE inline
#define EFFINFER_UNROLL
#define EFFINFER_UNROLL_BY(count)
#define EFFINFER_NO_UNROLL
#define EFFINFER_REGISTERS [[gnu::no_sanitize("thread")]]
#endif

namespace effinfer::cuda {

inline constexpr int kWarp = 32;

// The only compute capability that a kernel runs on (kArch), or 0.
template <class Kernel>
constexpr int required_arch() {
  if constexpr (requires { Kernel::kArch; }) {
    return Kernel::kArch;
  } else {
    return 0;
  }
}

// Whether a kernel is launched on GPUs of a compute capability: not where another one does its work
// (kReplacedOn).
template <class Kernel>
constexpr bool runs_on(int arch) {
  if constexpr (requires { Kernel::kReplacedOn; }) return arch != Kernel::kReplacedOn;
  return required_arch<Kernel>() == 0 || required_arch<Kernel>() == arch;
}

// 16 bytes, as one load or store of whatever numbers lie there.
struct [[gnu::may_alias]] alignas(16) Quad {
  uint32_t words[4];
};

struct Mbarrier {
  uint64_t state;
};

// A matrix in global memory and the box that copies take of it (tensor_map.h).
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// How the 16 bytes lie that a tile's rows are made of. `none`: 8 rows of 16 bytes one after the
// other. Else: in rows of 32, 64 or 128 bytes, whose piece i of 16 lies at i ^ (row / 4) % 2,
// i ^ (row / 2) % 4 or i ^ row % 8, from a multiple of 8 rows on.
//
// descriptor(first, leading, stride, swizzle) is of a tile with k along its rows: its 16 k are two
// pieces, with `leading` bytes between them where there is no swizzle; `stride` bytes are between
// each 8 rows. Where rows of memory are k instead (`kTransposed`), 8 rows of k follow each other
// after `stride` bytes and pieces beyond a swizzled row after `leading`; without swizzle pieces
// after `stride`, and 8 rows of k after `leading`. A tile that starts n bytes further has
// a descriptor larger by n / 16.
enum class Swizzle : uint8_t { none, bytes128, bytes64, bytes32 };

constexpr uint64_t make_descriptor(uint32_t address, uint32_t leading, uint32_t stride,
                                   Swizzle swizzle) {
  return uint64_t{address >> 4 & 0x3fff} | uint64_t{leading >> 4 & 0x3fff} << 16 |
         uint64_t{stride >> 4 & 0x3fff} << 32 | uint64_t{static_cast<uint8_t>(swizzle)} << 62;
}

// Not std::bit_cast, which is a call where nothing is inlined that need not be: in the emulator.
[[gnu::always_inline]] constexpr float float_of(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
[[gnu::always_inline]] constexpr uint32_t bits_of(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

}  // namespace effinfer::cuda
