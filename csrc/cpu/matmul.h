// The entry points of each ISA level for matmuls (ops/matmul.h).
#pragma once

#include <cstddef>

#include "effinfer/threads.h"
#include "ops/matmul.h"

namespace effinfer::cpu {

namespace portable {
void matmul_int8(const ops::MatmulProblem& problem, Team& team);
void matmul_ternary(const ops::MatmulProblem& problem, Team& team);
void matmul_f32(const ops::MatmulProblem& problem, Team& team);
}  // namespace portable

namespace avx2 {
void matmul_int8(const ops::MatmulProblem& problem, Team& team);
void matmul_ternary(const ops::MatmulProblem& problem, Team& team);
void matmul_lookup(const ops::MatmulProblem& problem, Team& team);
size_t lookup_scratch_bytes(const ops::MatmulProblem& problem);
void matmul_f32(const ops::MatmulProblem& problem, Team& team);
}  // namespace avx2

namespace avx512 {
void matmul_int8(const ops::MatmulProblem& problem, Team& team);
void matmul_ternary(const ops::MatmulProblem& problem, Team& team);
void matmul_lookup(const ops::MatmulProblem& problem, Team& team);
size_t lookup_scratch_bytes(const ops::MatmulProblem& problem);
void matmul_f32(const ops::MatmulProblem& problem, Team& team);
}  // namespace avx512

namespace avx512bf16 {
void matmul_bf16(const ops::MatmulProblem& problem, Team& team);
}  // namespace avx512bf16

// Only where the compiler knows the instructions (EFFINFER_AMX).
namespace amx {
void matmul_bf16(const ops::MatmulProblem& problem, Team& team);
void matmul_ternary(const ops::MatmulProblem& problem, Team& team);
}  // namespace amx

}  // namespace effinfer::cpu
