#include "effinfer/ops/activation.h"

#include "ops/elementwise.h"
#include "ops/row_layout.h"
#include "ops/run_rows.h"

namespace effinfer::ops {
namespace {

void gated(std::string_view op, GatedOp kind, const StridedView& input, const StridedView& out,
           ThreadPool& pool) {
  const Validator check(op);
  check_rows(check, "input", input);
  const int last = input.dims.rank() - 1;
  check.expect(input.dims[last] % 2 == 0, "input", "an even last dimension",
               "shape " + input.dims.to_string());
  Dims halved;
  for (int axis = 0; axis < last; ++axis) halved.push_back(input.dims[axis]);
  halved.push_back(input.dims[last] / 2);
  check_written_rows(check, "out", out, input.dtype, halved);
  const RowLayout layout = merge_rows(check, "input", {&input, &out});
  GatedProblem problem;
  problem.op = kind;
  problem.dtype = input.dtype;
  problem.x = layout.read(input, 0);
  problem.rows = layout.rows;
  problem.groups = layout.groups;
  problem.cols = halved[last];
  problem.out = layout.of(out, 1);
  if (halved.num_elements() > 0) run_rows(problem, pool);
}

}  // namespace

void silu_and_mul(const StridedView& input, const StridedView& out, ThreadPool& pool) {
  gated("silu_and_mul", GatedOp::silu, input, out, pool);
}

void gelu_and_mul(const StridedView& input, const StridedView& out, ThreadPool& pool) {
  gated("gelu_and_mul", GatedOp::gelu, input, out, pool);
}

void gelu_tanh_and_mul(const StridedView& input, const StridedView& out, ThreadPool& pool) {
  gated("gelu_tanh_and_mul", GatedOp::gelu_tanh, input, out, pool);
}

}  // namespace effinfer::ops
