#include "cpu/operand.h"
#include "cpu/operand_rows.h"
#include "cpu/vectors/math_avx512.h"

namespace effinfer::cpu::avx512 {
namespace {
struct Avx512 {
  using Vector = F32x16;
};
}  // namespace

void store_operand_row(const ops::Operand& out, int64_t row, const float* values) {
  OperandRows<Avx512>::store_row(out, row, values);
}

void store_operand_blocks(const ops::Operand& out, int64_t row, int64_t first_block,
                          int64_t num_blocks, const float* values) {
  OperandRows<Avx512>::store_blocks(out, row, first_block, num_blocks, values);
}

void to_operand(const ops::ToOperandProblem& problem, Team& team) {
  convert_rows<Avx512>(problem, team);
}

}  // namespace effinfer::cpu::avx512
