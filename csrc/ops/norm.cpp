#include "effinfer/ops/norm.h"

#include <cmath>

#include "ops/describe.h"
#include "ops/norm.h"
#include "ops/row_layout.h"
#include "ops/run_rows.h"

namespace effinfer::ops {
namespace {

constexpr const char* kEmptyRows = "cols and groups must be positive";
constexpr const char* kRowTypes = "rows must be f32, f16 or bf16, weights f32 or of the same type";

bool has_row_types(DType rows, DType weights) {
  return is_row_type(rows) && (weights == DType::f32 || weights == rows);
}

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
  check.data(argument, weight);
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

std::string describe(const RmsNormProblem& problem) {
  std::string text = "[rms_norm]" + field("rows", problem.rows) + field("groups", problem.groups) +
                     field("cols", problem.cols);
  if (problem.add_to.data != nullptr) text += " +residual";
  if (problem.out_operand.data != nullptr) {
    text += " out=" + std::string(name(problem.out_operand.arithmetic));
  }
  return text;
}

std::string describe(const LayerNormProblem& problem) {
  return "[layer_norm]" + field("rows", problem.rows) + field("groups", problem.groups) +
         field("cols", problem.cols);
}

const char* rejects(const RmsNormProblem& problem) {
  if (problem.cols < 1 || problem.groups < 1) return kEmptyRows;
  if (!has_row_types(problem.dtype, problem.weight_dtype)) return kRowTypes;
  return problem.out_operand.cols > 0 && problem.groups > 1 ? "a matmul operand has one group"
                                                            : nullptr;
}

const char* rejects(const LayerNormProblem& problem) {
  if (problem.cols < 1 || problem.groups < 1) return kEmptyRows;
  return has_row_types(problem.dtype, problem.weight_dtype) ? nullptr : kRowTypes;
}

size_t scratch_bytes(const RmsNormProblem& problem) {
  return problem.groups == 1 ? static_cast<size_t>(problem.cols) * sizeof(float) : 0;
}

Cost cost(const RmsNormProblem& problem) {
  const int64_t size = problem.rows * problem.groups * problem.cols;
  const bool adds = problem.add_to.data != nullptr;
  const int64_t row_bytes = size * dtype_info(problem.dtype).block_bytes;
  Cost cost{row_bytes * (adds ? 3 : 1), size * (adds ? 5 : 4)};
  if (problem.weight != nullptr) {
    cost.bytes += problem.cols * dtype_info(problem.weight_dtype).block_bytes;
  }
  cost.bytes += problem.out_operand.data != nullptr ? problem.rows * problem.out_operand.row_bytes()
                                                    : row_bytes;
  return cost;
}

Cost cost(const LayerNormProblem& problem) {
  const int64_t size = problem.rows * problem.groups * problem.cols;
  return {size * 2 * dtype_info(problem.dtype).block_bytes +
              problem.cols * 2 * dtype_info(problem.weight_dtype).block_bytes,
          size * 8};
}

void rmsnorm(const StridedView& input, const TensorView& weight, const RmsNormOptions& options,
             const StridedView& out, const Executor& executor) {
  const Validator check("rmsnorm", executor.device());
  RmsNormProblem problem = rms_problem(check, input, weight, options);
  check_written_rows(check, "out", out, input.dtype, input.dims);
  const RowLayout layout = merge_rows(check, "input", {&input, &out});
  problem.rows = layout.rows;
  problem.groups = layout.groups;
  problem.x = layout.read(input, 0);
  problem.out = layout.of(out, 1);
  if (input.dims.num_elements() > 0) run_rows(problem, executor);
}

void fused_add_rmsnorm(const StridedView& input, const StridedView& residual,
                       const TensorView& weight, const RmsNormOptions& options,
                       const Executor& executor) {
  const Validator check("fused_add_rmsnorm", executor.device());
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
  if (input.dims.num_elements() > 0) run_rows(problem, executor);
}

void layernorm(const StridedView& input, const TensorView& gemma, const TensorView& beta, float eps,
               const StridedView& out, const Executor& executor) {
  const Validator check("layernorm", executor.device());
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
  if (input.dims.num_elements() > 0) run_rows(problem, executor);
}

}  // namespace effinfer::ops
