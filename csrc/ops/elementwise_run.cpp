#include <cmath>

#include "effinfer/ops/elementwise.h"
#include "ops/elementwise.h"
#include "ops/run_rows.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

void unary(std::string_view op, UnaryOp kind, float parameter, const TensorView& x, float* out,
           ThreadPool& pool) {
  const Validator check(op);
  check.dtype("x", x, DType::f32);
  check.data("out", out, x.dims);
  const int64_t size = x.dims.num_elements();
  UnaryProblem problem;
  problem.op = kind;
  problem.parameter = parameter;
  problem.x = static_cast<const float*>(x.data);
  problem.rows = 1;
  problem.cols = problem.x_stride = problem.out_stride = size;
  problem.out = out;
  run_rows(problem, pool);
}

void binary(std::string_view op, BinaryOp kind, const TensorView& a, const TensorView& b,
            float* out, ThreadPool& pool) {
  const Validator check(op);
  check.dtype("a", a, DType::f32);
  check.dtype("b", b, DType::f32);
  check.shape("b", b, a.dims);
  check.data("out", out, a.dims);
  BinaryProblem problem;
  problem.op = kind;
  problem.a = static_cast<const float*>(a.data);
  problem.b = static_cast<const float*>(b.data);
  problem.size = a.dims.num_elements();
  problem.out = out;
  run_rows(problem, pool);
}

}  // namespace

void silu(const TensorView& x, float* out, ThreadPool& pool) {
  unary("silu", UnaryOp::silu, 0.0f, x, out, pool);
}

void gelu_tanh(const TensorView& x, float* out, ThreadPool& pool) {
  unary("gelu_tanh", UnaryOp::gelu_tanh, 0.0f, x, out, pool);
}

void relu_squared(const TensorView& x, float* out, ThreadPool& pool) {
  unary("relu_squared", UnaryOp::relu_squared, 0.0f, x, out, pool);
}

void softcap(const TensorView& x, float cap, float* out, ThreadPool& pool) {
  Validator("softcap").expect(std::isfinite(cap) && cap > 0.0f, "cap", "a positive number",
                              std::to_string(cap));
  unary("softcap", UnaryOp::softcap, cap, x, out, pool);
}

void scale(const TensorView& x, float factor, float* out, ThreadPool& pool) {
  unary("scale", UnaryOp::scale, factor, x, out, pool);
}

void add(const TensorView& a, const TensorView& b, float* out, ThreadPool& pool) {
  binary("add", BinaryOp::add, a, b, out, pool);
}

void mul(const TensorView& a, const TensorView& b, float* out, ThreadPool& pool) {
  binary("mul", BinaryOp::mul, a, b, out, pool);
}

}  // namespace effinfer::ops
