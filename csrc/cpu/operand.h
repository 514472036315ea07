// The entry points of each ISA level for matmul operands (ops/activation.h).
#pragma once

#include "effinfer/threads.h"
#include "ops/operand.h"

namespace effinfer::cpu {

namespace portable {
void store_operand_row(const ops::Operand& out, int64_t row, const float* values);
void store_operand_blocks(const ops::Operand& out, int64_t row, int64_t first_block,
                          int64_t num_blocks, const float* values);
void to_operand(const ops::ToOperandProblem& problem, Team& team);
}  // namespace portable

namespace avx2 {
void store_operand_row(const ops::Operand& out, int64_t row, const float* values);
void store_operand_blocks(const ops::Operand& out, int64_t row, int64_t first_block,
                          int64_t num_blocks, const float* values);
void to_operand(const ops::ToOperandProblem& problem, Team& team);
}  // namespace avx2

namespace avx512 {
void store_operand_row(const ops::Operand& out, int64_t row, const float* values);
void store_operand_blocks(const ops::Operand& out, int64_t row, int64_t first_block,
                          int64_t num_blocks, const float* values);
void to_operand(const ops::ToOperandProblem& problem, Team& team);
}  // namespace avx512

}  // namespace effinfer::cpu
