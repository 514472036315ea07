// Which kernel of bodies/wgmma_matmul.h multiplies which weights.
#include "cuda/bodies/wgmma_matmul.h"
#include "cuda/register.h"
#include "cuda/wgmma_launch.h"

namespace effinfer::cuda {

void multiply_wgmma(const ops::MatmulProblem& problem,
                    const std::array<bool, ops::kMaxMatmulParts>& takes, Queue& queue) {
  if (problem.x.rows == 0) return;
  const bool gated = problem.glu != ops::UnaryOp::none;
  WgmmaParams params;
  params.tokens = static_cast<int32_t>(problem.x.rows);
  params.superblocks = static_cast<int32_t>(blocks_for(problem.x.cols, ops::kSuperblock));
  params.glu = problem.glu;
  params.header_row_bytes = ops::header_row_bytes(problem.x.cols);
  params.operand = operand_out(problem.out_operand);
  ops::PackedFormat format;
  int count = 0;
  for (int i = 0; i < problem.num_parts; ++i) {
    if (!takes[i]) continue;
    WgmmaPart& part = params.parts[count++];
    part.weight = matmul_weight(problem.parts[i]);
    part.fours = has_fours(problem.parts[i]);
    format = problem.parts[i].weight.format;
    if (gated && i > 0) continue;  // goes with the first
    part.units = gated ? part.weight.groups : (part.weight.groups + 1) / 2;
  }
  params.header_bytes = ops::header_bytes(format, problem.x.cols);
  switch (format.bits) {
    case ops::QuantBits::u4:
      return launch_wgmma_u4(format, problem.x, params, queue);
    case ops::QuantBits::u5:
    case ops::QuantBits::u6:
      return launch_wgmma_u5_u6(format, problem.x, params, queue);
    default:
      return launch_wgmma_u8_dense(format, problem.x, params, queue);
  }
}

}  // namespace effinfer::cuda
