#include "cpu/operand.h"

#include "cpu/level.h"
#include "cpu/vectors/operand_rows.h"
#include "effinfer/threads.h"

namespace effinfer::cpu {

template <>
const OperandKernels& kernels<Level::EFFINFER_LEVEL>() {
  using EFFINFER_LEVEL::OperandRows;
  static constexpr OperandKernels kKernels = {OperandRows::store_row, OperandRows::store_blocks};
  return kKernels;
}

// One row is one chunk.
template <>
void run<Level::EFFINFER_LEVEL>(const ops::ToOperandProblem& problem, Team& team) {
  team.for_chunks(problem.out.rows, [&](int64_t row) {
    EFFINFER_LEVEL::OperandRows::store_row(problem.out, row, problem.x + row * problem.x_stride);
  });
}

}  // namespace effinfer::cpu
