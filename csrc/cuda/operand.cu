#include "cuda/bodies/operand_rows.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

const char* rejects(const ops::ToOperandProblem& p) {
  return multiplies_on_gpu(p.out.arithmetic) ? nullptr : kArithmetics;
}

void to_operand(const ops::ToOperandProblem& p, Queue& queue) {
  using Kernel = ToOperandKernel;
  Kernel::Params params;
  params.x = p.x;
  params.x_stride = p.x_stride;
  params.out = OperandRows::of(p.out);
  params.parts =
      static_cast<int>(blocks_for(params.out.padded, Kernel::kThreads * Kernel::kNumbers));
  params.vectored = vectored(p.x, p.out.cols, 4) && p.x_stride % 4 == 0;
  launch<Kernel>(params, p.out.rows * params.parts, queue);
}

}  // namespace

void register_operand() {
  add<ops::ToOperandProblem>("to_operand", rejects, to_operand);
}

}  // namespace effinfer::cuda
