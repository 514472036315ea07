#include "cpu/operand.h"

#include "cpu/operand_rows.h"
#include "cpu/vectors/math_portable.h"

namespace effinfer::cpu::portable {
namespace {
struct Portable {
  using Vector = F32x16;
};
}  // namespace

void store_operand_row(const ops::Operand& out, int64_t row, const float* values) {
  OperandRows<Portable>::store_row(out, row, values);
}

void store_operand_blocks(const ops::Operand& out, int64_t row, int64_t first_block,
                          int64_t num_blocks, const float* values) {
  OperandRows<Portable>::store_blocks(out, row, first_block, num_blocks, values);
}

void to_operand(const ops::ToOperandProblem& problem, Team& team) {
  convert_rows<Portable>(problem, team);
}

}  // namespace effinfer::cpu::portable
