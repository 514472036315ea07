#include "cpu/operand.h"

#include "cpu/level.h"
#include "cpu/vectors/float_vector.h"
#include "cpu/vectors/operand_rows.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {
struct Vectors {
  using Vector = F32x16;
};
using Rows = OperandRows<Vectors>;
}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const OperandKernels& kernels<Level::EFFINFER_LEVEL>() {
  using EFFINFER_LEVEL::Rows;
  static constexpr OperandKernels kKernels = {Rows::store_row, Rows::store_blocks};
  return kKernels;
}

// One row is one chunk.
template <>
void run<Level::EFFINFER_LEVEL>(const ops::ToOperandProblem& problem, Team& team) {
  team.for_chunks(problem.out.rows, [&](int64_t row) {
    EFFINFER_LEVEL::Rows::store_row(problem.out, row, problem.x + row * problem.x_stride);
  });
}

}  // namespace effinfer::cpu
