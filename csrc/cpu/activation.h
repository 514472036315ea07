// The entry points of each ISA level for matmul operands (kernels/activation.h).
#pragma once

#include "effinfer/threads.h"
#include "kernels/activation.h"

namespace effinfer::cpu {

namespace portable {
void store_activation_row(const kernels::Activation& out, int64_t row, const float* values);
void store_activation_blocks(const kernels::Activation& out, int64_t row, int64_t first_block,
                             int64_t num_blocks, const float* values);
void to_activation(const kernels::ToActivationProblem& problem, Team& team);
}  // namespace portable

namespace avx2 {
void store_activation_row(const kernels::Activation& out, int64_t row, const float* values);
void store_activation_blocks(const kernels::Activation& out, int64_t row, int64_t first_block,
                             int64_t num_blocks, const float* values);
void to_activation(const kernels::ToActivationProblem& problem, Team& team);
}  // namespace avx2

namespace avx512 {
void store_activation_row(const kernels::Activation& out, int64_t row, const float* values);
void store_activation_blocks(const kernels::Activation& out, int64_t row, int64_t first_block,
                             int64_t num_blocks, const float* values);
void to_activation(const kernels::ToActivationProblem& problem, Team& team);
}  // namespace avx512

}  // namespace effinfer::cpu
