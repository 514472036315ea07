#include "ops/elementwise.h"

#include <cmath>

#include "ops/describe.h"
#include "ops/run_rows.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

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

// Of the operators from `first` on.
UnaryOp parse_from(UnaryOp first, std::string_view text) {
  std::string names;
  for (auto i = static_cast<size_t>(first); i < kUnaryOpNames.size(); ++i) {
    if (kUnaryOpNames[i] == text) return static_cast<UnaryOp>(i);
    names.append(names.empty() ? "" : ", ").append(kUnaryOpNames[i]);
  }
  throw InvalidArgument("[unary] op: expected one of " + names + ", got \"" + std::string(text) +
                        "\"");
}

}  // namespace

std::string_view name(UnaryOp op) {
  const auto index = static_cast<size_t>(op);
  if (index >= kUnaryOpNames.size()) {
    throw InvalidArgument("[unary] op: expected less than " + std::to_string(kUnaryOpNames.size()) +
                          ", got " + std::to_string(index));
  }
  return kUnaryOpNames[index];
}

UnaryOp parse_unary_op(std::string_view text) {
  return parse_from(UnaryOp::scale, text);
}

UnaryOp parse_activation(std::string_view text) {
  return parse_from(UnaryOp::silu, text);
}

BinaryOp parse_binary_op(std::string_view text) {
  if (text == "add") return BinaryOp::add;
  if (text == "mul") return BinaryOp::mul;
  throw InvalidArgument("[binary] op: expected add or mul, got \"" + std::string(text) + "\"");
}

std::string describe(const UnaryProblem& problem) {
  return std::string("[").append(name(problem.op)).append("]") + field("rows", problem.rows) +
         field("cols", problem.cols);
}

std::string describe(const BinaryProblem& problem) {
  return std::string(problem.op == BinaryOp::add ? "[add]" : "[mul]") + field("size", problem.size);
}

const char* rejects(const UnaryProblem& problem) {
  const bool known =
      is_activation(problem.op) || problem.op == UnaryOp::scale || problem.op == UnaryOp::softcap;
  return known ? nullptr : "has no operation";
}

Cost cost(const UnaryProblem& problem) {
  const int64_t size = problem.rows * problem.cols;
  return {size * 8, size};
}

Cost cost(const BinaryProblem& problem) {
  return {problem.size * 12, problem.size};
}

void unary(UnaryOp op, const TensorView& x, float parameter, float* out, ThreadPool& pool) {
  const Validator check(name(op));
  check.dtype("x", x, DType::f32);
  check.data("out", out, x.dims);
  if (op == UnaryOp::softcap) {
    check.expect(std::isfinite(parameter) && parameter > 0.0f, "cap", "a positive number",
                 std::to_string(parameter));
  }
  UnaryProblem problem;
  problem.op = op;
  problem.parameter = parameter;
  problem.x = static_cast<const float*>(x.data);
  problem.rows = 1;
  problem.cols = problem.x_stride = problem.out_stride = x.dims.num_elements();
  problem.out = out;
  run_rows(problem, pool);
}

void add(const TensorView& a, const TensorView& b, float* out, ThreadPool& pool) {
  binary("add", BinaryOp::add, a, b, out, pool);
}

void mul(const TensorView& a, const TensorView& b, float* out, ThreadPool& pool) {
  binary("mul", BinaryOp::mul, a, b, out, pool);
}

}  // namespace effinfer::ops
