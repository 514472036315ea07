// The kinds of matmul kernels; matmul_<kind>.simd.cpp has one for each of its levels.
#pragma once

#include <cstddef>

#include "effinfer/threads.h"
#include "ops/matmul.h"

namespace effinfer::cpu {

struct MatmulKernel {
  void (*run)(const ops::MatmulProblem&, Team&);
  size_t (*scratch_bytes)(const ops::MatmulProblem&) = nullptr;  // of a member; null: none
};

struct Int8Kernel : MatmulKernel {};     // int8 operands
struct TernaryKernel : MatmulKernel {};  // int8_token operands
struct LookupKernel : MatmulKernel {};   // the same by table look-up
struct PanelKernel : MatmulKernel {};    // f32 operands; bf16 ones from avx512bf16 on

}  // namespace effinfer::cpu
