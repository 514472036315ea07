#include "effinfer/ops/rms_norm.h"

#include <cmath>

#include "kernels/elementwise.h"
#include "kernels/registry.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

kernels::RmsNormProblem make_problem(const Validator& check, const TensorView& x,
                                     const TensorView& weight, const RmsNormOptions& options,
                                     float* out) {
  check.dtype("x", x, DType::f32);
  check.expect(x.dims.rank() >= 1, "x", "at least one dimension", "a scalar");
  check.expect(std::isfinite(options.eps) && options.eps >= 0.0f, "eps", "a number >= 0",
               std::to_string(options.eps));
  const int64_t width = x.dims[x.dims.rank() - 1];
  check.expect(options.groups >= 1, "groups", "at least 1", std::to_string(options.groups));
  check.expect(width > 0 && width % options.groups == 0, "x",
               "a last dimension of " + std::to_string(options.groups) + " equal groups",
               "shape " + x.dims.to_string());
  check.data("out", out, x.dims);
  kernels::RmsNormProblem problem;
  problem.cols = width / options.groups;
  if (weight.data != nullptr) {
    check.dtype("weight", weight, DType::f32);
    check.shape("weight", weight, {problem.cols});
  }
  problem.x = static_cast<const float*>(x.data);
  problem.rows = x.dims.num_elements() / width;
  problem.groups = options.groups;
  problem.weight = static_cast<const float*>(weight.data);
  problem.eps = options.eps;
  problem.out = out;
  return problem;
}

}  // namespace

void rms_norm(const TensorView& x, const TensorView& weight, const RmsNormOptions& options,
              float* out, ThreadPool& pool) {
  kernels::run_alone(make_problem(Validator("rms_norm"), x, weight, options, out), pool);
}

void add_rms_norm(const TensorView& x, const TensorView& residual, const TensorView& weight,
                  const RmsNormOptions& options, float* sum, float* out, ThreadPool& pool) {
  const Validator check("add_rms_norm");
  kernels::RmsNormProblem problem = make_problem(check, x, weight, options, out);
  check.dtype("residual", residual, DType::f32);
  check.shape("residual", residual, x.dims);
  check.data("sum", sum, x.dims);
  problem.add_to = static_cast<const float*>(residual.data);
  problem.sum_out = sum;
  kernels::run_alone(problem, pool);
}

}  // namespace effinfer::ops
