#include "cuda/bodies/operand_rows.h"
#include "cuda/bodies/token_rows.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

const char* rejects(const ops::ToOperandProblem& p) {
  if (p.out.arithmetic == ops::Arithmetic::int8_token) return nullptr;
  return multiplies_on_gpu(p.out.arithmetic) ? nullptr : kArithmetics;
}

void to_token_rows(const ops::ToOperandProblem& p, Queue& queue) {
  TokenRowsParams params;
  params.x = p.x;
  params.x_stride = p.x_stride;
  params.out = static_cast<uint8_t*>(p.out.data);
  params.row_bytes = p.out.row_bytes();
  params.cols = static_cast<int>(p.out.cols);
  params.padded = static_cast<int>(ops::padded_cols(p.out.cols));
  params.vectored = vectored(p.x, p.out.cols, 4) && p.x_stride % 4 == 0;
  launch<TokenRowsKernel>(params, p.out.rows, queue);
}

void to_operand(const ops::ToOperandProblem& p, Queue& queue) {
  if (p.out.arithmetic == ops::Arithmetic::int8_token) return to_token_rows(p, queue);
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
