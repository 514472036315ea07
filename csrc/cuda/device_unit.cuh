// A thread of a GPU as kernels see it (unit.h), in PTX. Each wrapper has a test of its own that
// runs where there is a GPU (tests/gpu/test_unit.cpp).
#pragma once

#include <cuda_runtime.h>

#include "cuda/unit.h"
#include "cuda/wgmma.cuh"

namespace effinfer::cuda {

class DeviceUnit {
 public:
  int thread;
  int lane;
  int warp;
  int block;
  int num_blocks;

  __device__ __forceinline__ DeviceUnit()
      : thread(static_cast<int>(threadIdx.x)),
        lane(static_cast<int>(threadIdx.x % kWarp)),  // unsigned: the compiler sees it is no less
        warp(static_cast<int>(threadIdx.x / kWarp)),
        block(static_cast<int>(blockIdx.x)),
        num_blocks(static_cast<int>(gridDim.x)) {}

  __device__ __forceinline__ static DeviceUnit anew() {
    DeviceUnit unit;
    unsigned own;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(own));
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(unit.block));
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(unit.num_blocks));
    unit.thread = static_cast<int>(own);
    unit.lane = static_cast<int>(own % kWarp);
    unit.warp = static_cast<int>(own / kWarp);
    return unit;
  }

  // First of all: lets the next kernel's blocks come as soon as there is room for them, which hides
  // what a launch costs.
  __device__ __forceinline__ void start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
  }
  // As each kernel waits for the one before, it has waited for all of them.
  __device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  }

  __device__ __forceinline__ void sync() { __syncthreads(); }
  __device__ __forceinline__ void sync_warp() { __syncwarp(); }
  __device__ __forceinline__ void keep_order() { __syncwarp(); }

  template <class T>
  __device__ __forceinline__ T shfl(T value, int from) {
    return __shfl_sync(kAll, value, from);
  }
  template <class T>
  __device__ __forceinline__ T shfl_xor(T value, int mask) {
    return __shfl_xor_sync(kAll, value, mask);
  }
  __device__ __forceinline__ uint32_t same(uint32_t value) {
    return __reduce_max_sync(kAll, value);
  }
  __device__ __forceinline__ uint32_t ballot(bool value) { return __ballot_sync(kAll, value); }

  __device__ __forceinline__ void copy_async(void* to, const void* from, bool valid = true) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(in_shared(to)),
                 "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
  }
  __device__ __forceinline__ void copy_async_if(bool does, void* to, const void* from) {
    asm volatile(
        "{\n"
        ".reg .pred does;\n"
        "setp.ne.u32 does, %2, 0;\n"
        "@does cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
        "}" ::"r"(in_shared(to)),
        "l"(from), "r"(static_cast<uint32_t>(does))
        : "memory");
  }
  __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int kPending>
  __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  }

  __device__ __forceinline__ void ldmatrix(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(in_shared(row))
                 : "memory");
  }
  __device__ __forceinline__ void ldmatrix_transposed(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(in_shared(row))
                 : "memory");
  }
  __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4],
                                      const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  __device__ __forceinline__ void mma_first(float (&d)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
  }
  __device__ __forceinline__ void mma_onto(float (&d)[4], const uint32_t (&a)[4],
                                           const uint32_t (&b)[2], const float (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  }
  __device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4],
                                          const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  __device__ __forceinline__ void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  template <class T>
  __device__ __forceinline__ T load(const T* pointer) {
    return __ldg(pointer);
  }
  __device__ __forceinline__ Quad load(const Quad* pointer) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(pointer));
    return {words.x, words.y, words.z, words.w};
  }
  // Where the program has it: loads that precede their use by others are under way together.
  __device__ __forceinline__ uint64_t load_written(const uint64_t* pointer) {
    uint64_t value;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(value) : "l"(pointer));
    return value;
  }
  __device__ __forceinline__ uint16_t load_written(const uint16_t* pointer) {
    uint16_t value;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(value) : "l"(pointer));
    return value;
  }
  __device__ __forceinline__ Quad load_written(const Quad* pointer) {
    Quad quad;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(quad.words[0]), "=r"(quad.words[1]), "=r"(quad.words[2]),
                   "=r"(quad.words[3])
                 : "l"(pointer)
                 : "memory");
    return quad;
  }
  template <class T>
  __device__ __forceinline__ T load_once(const T* pointer) {
    return __ldcs(pointer);
  }
  __device__ __forceinline__ Quad load_once(const Quad* pointer) {
    const uint4 words = __ldcs(reinterpret_cast<const uint4*>(pointer));
    return {words.x, words.y, words.z, words.w};
  }

  // By one instruction, or a line of the cache a lane.
  __device__ __forceinline__ void prefetch(const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      asm volatile(
          "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
          "r"(bytes));
    }
#else
    constexpr int kLine = 128;
    const size_t first = __cvta_generic_to_global(from);
    EFFINFER_NO_UNROLL
    for (int at = lane * kLine; at < bytes; at += kWarp * kLine) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(first + at));
    }
#endif
  }

  template <class T>
  __device__ __forceinline__ T atomic_add(T* pointer, T value) {
    return atomicAdd(pointer, value);
  }
  __device__ __forceinline__ void add_shared(uint32_t* pointer, uint32_t value) {
    asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(in_shared(pointer)), "r"(value) : "memory");
  }
  __device__ __forceinline__ void add_global(uint64_t* pointer, uint64_t value) {
    asm volatile("red.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(pointer)), "l"(value)
                 : "memory");
  }
  __device__ __forceinline__ void fence() {
    // __threadfence() orders all of them with those of all others, which takes longer.
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }

  __device__ __forceinline__ uint32_t bf16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  __device__ __forceinline__ uint32_t f16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  __device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
  __device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
  }
  __device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
  }
  __device__ __forceinline__ float exp2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
  }
  __device__ __forceinline__ float reciprocal(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
  }
  __device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t picks) {
    return __byte_perm(a, b, picks);
  }
  __device__ __forceinline__ int popcount(uint32_t bits) { return __popc(bits); }
  __device__ __forceinline__ int lowest_bit(uint32_t bits) {
    return __ffs(static_cast<int>(bits)) - 1;
  }
  __device__ __forceinline__ uint32_t rotate(uint32_t word, int bits) {
    return __funnelshift_l(word, word, static_cast<uint32_t>(bits));
  }
  __device__ __forceinline__ float from_f16(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }

  __device__ __forceinline__ void sync_some(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
  }
  __device__ __forceinline__ void arrive_some(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
  }

  template <class T>
  __device__ __forceinline__ static T kept(T value) {
    asm volatile("" : "+r"(value));
    return value;
  }
  __device__ __forceinline__ static float kept(float value) {
    asm volatile("" : "+f"(value));
    return value;
  }
  template <class T>
  __device__ __forceinline__ static T* kept(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
  }
  // Where blocks have clusters the compiler asks for the block's number in its cluster each time.
  template <class T>
  __device__ __forceinline__ static T* kept_shared(T* pointer) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t address = in_shared(pointer);
    asm volatile("" : "+r"(address));
    return static_cast<T*>(__cvta_shared_to_generic(address));
#else
    return pointer;
#endif
  }

  // --- Hopper

  __device__ __forceinline__ static constexpr bool has_bulk_copies() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    return true;
#else
    return false;
#endif
  }
  __device__ __forceinline__ void barrier_init(Mbarrier& barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(in_shared(&barrier)), "r"(count)
                 : "memory");
  }
  __device__ __forceinline__ void barrier_arrive(Mbarrier& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(in_shared(&barrier)) : "memory");
  }
  __device__ __forceinline__ void barrier_arrive_expect(Mbarrier& barrier, int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(&barrier)),
        "r"(bytes)
        : "memory");
  }
  // The instruction waits for a time that the hardware chooses, or less.
  __device__ __forceinline__ void barrier_wait(Mbarrier& barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@!over bra again;\n"
        "}" ::"r"(in_shared(&barrier)),
        "r"(parity)
        : "memory");
  }
  // Shared memory of the block is part of its cluster's, which is the block alone.
  __device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes,
                                            Mbarrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(in_shared(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(in_shared(&barrier))
        : "memory");
  }
  __device__ __forceinline__ void copy_tile(void* to, const TensorMap& map, int col, int row,
                                            Mbarrier& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3}], [%4];" ::"r"(in_shared(to)),
        "l"(&map), "r"(col), "r"(row), "r"(in_shared(&barrier))
        : "memory");
  }
  __device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  __device__ __forceinline__ uint64_t descriptor(const void* first, int leading, int stride,
                                                 Swizzle swizzle) const {
    return make_descriptor(in_shared(first), static_cast<uint32_t>(leading),
                           static_cast<uint32_t>(stride), swizzle);
  }
  template <bool kTransposed = false, int kSums>
  __device__ __forceinline__ void wgmma(float (&d)[kSums], uint32_t (&a)[4], uint64_t b,
                                        bool adds = true) {
    ptx::wgmma<ptx::Half::bf16, kTransposed>(d, a, b, adds);
  }
  template <bool kTransposedA = false, bool kTransposed = false, int kSums>
  __device__ __forceinline__ void wgmma(float (&d)[kSums], uint64_t a, uint64_t b,
                                        bool adds = true) {
    ptx::wgmma<ptx::Half::bf16, kTransposedA, kTransposed>(d, a, b, adds);
  }
  template <bool kTransposed = false, int kSums>
  __device__ __forceinline__ void wgmma_f16(float (&d)[kSums], uint32_t (&a)[4], uint64_t b,
                                            bool adds = true) {
    ptx::wgmma<ptx::Half::f16, kTransposed>(d, a, b, adds);
  }
  template <bool kTransposedA = false, bool kTransposed = false, int kSums>
  __device__ __forceinline__ void wgmma_f16(float (&d)[kSums], uint64_t a, uint64_t b,
                                            bool adds = true) {
    ptx::wgmma<ptx::Half::f16, kTransposedA, kTransposed>(d, a, b, adds);
  }
  template <class... Registers>
  __device__ __forceinline__ void wgmma_fence(Registers&... registers) {
    (pin(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  }
  __device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  template <int kPending, class... Registers>
  __device__ __forceinline__ void wgmma_wait(Registers&... registers) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    (pin(registers), ...);
  }
  template <int kCount>
  __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  }
  template <int kCount>
  __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
  }

 private:
  // For the compiler they change here: it moves no access of them to the other side.
  template <int kCount>
  __device__ __forceinline__ static void pin(float (&registers)[kCount]) {
    EFFINFER_UNROLL
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
  }
  template <int kCount>
  __device__ __forceinline__ static void pin(uint32_t (&registers)[kCount]) {
    EFFINFER_UNROLL
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
  }

  static constexpr unsigned kAll = 0xffffffffu;

  __device__ __forceinline__ static uint32_t in_shared(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  }
};

}  // namespace effinfer::cuda
