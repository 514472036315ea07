// What kernels are written in, for GPUs and for the emulator of the tests alike.
//
// A kernel is a struct of static members:
//
//   struct Add {
//     static constexpr const char* kName = "add";   // in errors and profiles
//     static constexpr int kThreads = 128;          // of a block: whole warps of 32
//     static constexpr int kMinBlocks = 2;          // optional: that an SM is to hold at once
//     using Params = ...;                           // a POD, at most 4 KB, copied to each block
//     struct Shared { ... };                        // of a block; its contents are undefined
//     template <class Unit>
//     EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared);
//   };
//
// and runs as launch<Add>(params, blocks, queue) (entry.h). A Unit is one thread of a block:
//
//   thread, lane, warp      in the block, in its warp, which warp; block, num_blocks: of the grid
//   sync(), sync_warp()     a barrier of the block, of the warp
//   keep_order()            compilers do not move loads of shared memory across it, which would take
//                           registers; it orders nothing for other threads. All of a warp call it
//   shfl_xor(value, mask)   the value of lane ^ mask; shfl(value, lane): of that lane
//   ballot(bool)            a bit for each lane
//   copy_async(to, from, valid)   16 aligned bytes of global memory into shared memory, zeros where
//                                 not `valid`; they are there after commit() and a wait<n>() that
//                                 leaves at most the n newest groups under way, and for other
//                                 threads after a barrier that follows it
//   ldmatrix(out, row)      four 8 x 8 matrices of 16-bit numbers from shared memory;
//                           ldmatrix_transposed: each with its rows for columns
//   mma(d, a, b)            d += a b: m16n8k16 of bfloat16, sums in float32; mma_f16 of float16;
//                           mma_s8: m16n8k32 of int8, sums in int32
//   load(pointer)           global memory that no kernel writes while this one runs; load_once():
//                           which nobody will read again soon, such as weights
//   atomic_add(pointer, n)  on global memory; returns what was there. fence() orders what a thread
//                           wrote to global memory before it against what it writes after it, for
//                           other blocks
//   bf16x2(low, high)       two floats rounded to nearest even; f16x2(low, high): as float16
//   from_f16(bits)          the float of a float16
//   mul(a, b)               the rounded product: no addition after it becomes one with it
//   fma_bf16x2(a, b, c)     a b + c of two bfloat16 each
//   exp2(x), reciprocal(x)  2^x and 1 / x within a few units of the last place, in one instruction;
//                           subnormal numbers are 0
//   permute(a, b, picks)    byte i of the result is byte picks >> 4 i & 7 of the eight of a, b
//
// All threads of a warp call the collectives (shuffles, ballot, ldmatrix, mma, sync_warp) together,
// those of a block sync(). A thread that has left the kernel takes part in nothing, so a kernel
// returns early only for whole blocks.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define EFFINFER_DEVICE __device__ __forceinline__
#define EFFINFER_UNROLL _Pragma("unroll")
#else
#define EFFINFER_DEVICE inline
#define EFFINFER_UNROLL
#endif

namespace effinfer::cuda {

inline constexpr int kWarp = 32;

// 16 bytes, as one load or store of whatever numbers lie there.
struct [[gnu::may_alias]] alignas(16) Quad {
  uint32_t words[4];
};

EFFINFER_DEVICE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
EFFINFER_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace effinfer::cuda
