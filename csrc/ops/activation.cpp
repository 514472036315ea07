#include "effinfer/ops/activation.h"

#include "ops/activation.h"
#include "ops/describe.h"
#include "ops/row_layout.h"
#include "ops/run_rows.h"

namespace effinfer::ops {
namespace {

void gated(std::string_view op, UnaryOp kind, const StridedView& input, const StridedView& out,
           const Executor& executor) {
  const Validator check(op, executor.device());
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
  if (halved.num_elements() > 0) run_rows(problem, executor);
}

}  // namespace

std::string describe(const GatedProblem& problem) {
  return std::string("[").append(name(problem.op)).append("_and_mul]") +
         field("rows", problem.rows * problem.groups) + field("cols", problem.cols);
}

const char* rejects(const GatedProblem& problem) {
  if (!is_activation(problem.op)) return "op must be an activation";
  return is_row_type(problem.dtype) ? nullptr : "rows must be f32, f16 or bf16";
}

Cost cost(const GatedProblem& problem) {
  const int64_t size = problem.rows * problem.groups * problem.cols;
  return {size * 3 * dtype_info(problem.dtype).block_bytes, size * 2};
}

void silu_and_mul(const StridedView& input, const StridedView& out, const Executor& executor) {
  gated("silu_and_mul", UnaryOp::silu, input, out, executor);
}

void gelu_and_mul(const StridedView& input, const StridedView& out, const Executor& executor) {
  gated("gelu_and_mul", UnaryOp::gelu, input, out, executor);
}

void gelu_tanh_and_mul(const StridedView& input, const StridedView& out, const Executor& executor) {
  gated("gelu_tanh_and_mul", UnaryOp::gelu_tanh, input, out, executor);
}

}  // namespace effinfer::ops
