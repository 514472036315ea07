// The AMX kernels over a tile unit in plain C++ (emulated_tiles.h). What they do beside tiles needs
// AVX-512: call them where cpu_features().avx512_bf16 only.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "effinfer/threads.h"
#include "ops/matmul.h"

namespace emulated {

// What the kernel matmul.amx.bf16 computes.
void matmul_bf16(const effinfer::ops::MatmulProblem& problem, effinfer::Team& team);

// What the kernel matmul.amx.ternary computes.
void matmul_ternary(const effinfer::ops::MatmulProblem& problem, effinfer::Team& team);

// What the kernel attention.amx.bf16 computes of bf16 keys, and how it merges.
extern const effinfer::cpu::AttentionKernels kAttention;

// One TDPBF16PS of tiles of `rows` x 32 and 32 x 16 values.
void dpbf16ps(float* c, const uint16_t* a, const uint16_t* b, int rows);

// What the tile unit calls instead of raising #UD. For the test to define: an ISA file must not
// hold the code of exceptions.
[[noreturn]] void refuse(const char* expected);

}  // namespace emulated
