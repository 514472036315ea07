#include "cuda/bodies/int8_rows.h"
#include "cuda/bodies/operand_rows.h"
#include "cuda/bodies/token_rows.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

// Of both kinds of integers.
template <class Params>
Params integer_rows(const ops::ToOperandProblem& p) {
  Params params;
  params.x = p.x;
  params.x_stride = p.x_stride;
  params.out = static_cast<uint8_t*>(p.out.data);
  params.row_bytes = p.out.row_bytes();
  params.cols = static_cast<int>(p.out.cols);
  params.padded = static_cast<int>(ops::padded_cols(p.out.cols));
  params.vectored = vectored(p.x, p.out.cols, 4) && p.x_stride % 4 == 0;
  return params;
}

void to_int8_rows(const ops::ToOperandProblem& p, Queue& queue) {
  using Kernel = Int8RowsKernel;
  auto params = integer_rows<Kernel::Params>(p);
  params.rows = p.out.rows;
  launch<Kernel>(params, blocks_for(p.out.rows * params.padded / Kernel::kBlock, Kernel::kThreads),
                 queue);
}

void to_operand(const ops::ToOperandProblem& p, Queue& queue) {
  if (p.out.arithmetic == ops::Arithmetic::int8) return to_int8_rows(p, queue);
  if (p.out.arithmetic == ops::Arithmetic::int8_token) {
    return launch<TokenRowsKernel>(integer_rows<TokenRowsParams>(p), p.out.rows, queue);
  }
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
  add<ops::ToOperandProblem>("to_operand", takes_all, to_operand);
}

}  // namespace effinfer::cuda
