#include "effinfer/ops/norm.h"

#include <cmath>

#include "ops/elementwise.h"
#include "ops/row_layout.h"
#include "ops/run_rows.h"

namespace effinfer::ops {
namespace {

// What all norms ask of x and eps; the length of a row.
int64_t check_norm(const Validator& check, const StridedView& input, float eps) {
  check_rows(check, "input", input);
  check.expect(std::isfinite(eps) && eps >= 0.0f, "eps", "a number >= 0", std::to_string(eps));
  const int64_t cols = input.dims[input.dims.rank() - 1];
  check.expect(cols > 0, "input", "a last dimension of at least 1",
               "shape " + input.dims.to_string());
  return cols;
}

void check_weight(const Validator& check, std::string_view argument, const TensorView& weight,
                  DType rows, int64_t cols) {
  const bool fits = weight.dtype == DType::f32 || weight.dtype == rows;
  std::string expected = "dtype f32";
  if (rows != DType::f32) expected += " or " + std::string(name(rows));
  check.expect(fits, argument, expected, name(weight.dtype));
  check.shape(argument, weight, {cols});
  check.data(argument, weight.data, weight.dims);
}

RmsNormProblem rms_problem(const Validator& check, const StridedView& input,
                           const TensorView& weight, const RmsNormOptions& options) {
  RmsNormProblem problem;
  problem.cols = check_norm(check, input, options.eps);
  problem.dtype = input.dtype;
  if (weight.data != nullptr) {
    check_weight(check, "weight", weight, input.dtype, problem.cols);
    problem.weight = weight.data;
    problem.weight_dtype = weight.dtype;
  }
  problem.weight_offset = options.weight_offset;
  problem.eps = options.eps;
  return problem;
}

}  // namespace

void rmsnorm(const StridedView& input, const TensorView& weight, const RmsNormOptions& options,
             const StridedView& out, ThreadPool& pool) {
  const Validator check("rmsnorm");
  RmsNormProblem problem = rms_problem(check, input, weight, options);
  check_written_rows(check, "out", out, input.dtype, input.dims);
  const RowLayout layout = merge_rows(check, "input", {&input, &out});
  problem.rows = layout.rows;
  problem.groups = layout.groups;
  problem.x = layout.read(input, 0);
  problem.out = layout.of(out, 1);
  if (input.dims.num_elements() > 0) run_rows(problem, pool);
}

void fused_add_rmsnorm(const StridedView& input, const StridedView& residual,
                       const TensorView& weight, const RmsNormOptions& options, ThreadPool& pool) {
  const Validator check("fused_add_rmsnorm");
  RmsNormProblem problem = rms_problem(check, input, weight, options);
  check_written_rows(check, "input", input, input.dtype, input.dims);
  check_written_rows(check, "residual", residual, input.dtype, input.dims);
  const RowLayout layout = merge_rows(check, "input", {&input, &residual});
  problem.rows = layout.rows;
  problem.groups = layout.groups;
  problem.x = layout.read(input, 0);
  problem.out = layout.of(input, 0);
  problem.add_to = layout.read(residual, 1);
  problem.sum_out = layout.of(residual, 1);
  if (input.dims.num_elements() > 0) run_rows(problem, pool);
}

void layernorm(const StridedView& input, const TensorView& gemma, const TensorView& beta, float eps,
               const StridedView& out, ThreadPool& pool) {
  const Validator check("layernorm");
  LayerNormProblem problem;
  problem.cols = check_norm(check, input, eps);
  check_weight(check, "gemma", gemma, input.dtype, problem.cols);
  check_weight(check, "beta", beta, input.dtype, problem.cols);
  check.expect(beta.dtype == gemma.dtype, "beta", "dtype " + std::string(name(gemma.dtype)),
               name(beta.dtype));
  check_written_rows(check, "out", out, input.dtype, input.dims);
  const RowLayout layout = merge_rows(check, "input", {&input, &out});
  problem.dtype = input.dtype;
  problem.x = layout.read(input, 0);
  problem.rows = layout.rows;
  problem.groups = layout.groups;
  problem.weight_dtype = gemma.dtype;
  problem.weight = gemma.data;
  problem.bias = beta.data;
  problem.eps = eps;
  problem.out = layout.of(out, 1);
  if (input.dims.num_elements() > 0) run_rows(problem, pool);
}

}  // namespace effinfer::ops
