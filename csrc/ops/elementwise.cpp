#include "ops/elementwise.h"

#include <cmath>

#include "ops/describe.h"
#include "ops/run_rows.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

std::string_view name(const UnaryOpNames& names) {
  return names.op;
}
std::string_view name(std::string_view name) {
  return name;
}

// `kind` is what messages call the table.
template <class Table, class Op>
const auto& entry(std::string_view kind, const Table& table, Op op) {
  const auto index = static_cast<size_t>(op);
  if (index < table.size()) return table[index];
  throw InvalidArgument("[" + std::string(kind) + "] op: expected less than " +
                        std::to_string(table.size()) + ", got " + std::to_string(index));
}

// Finds the operator among those from `first` on.
template <class Op, class Table>
Op parse_from(std::string_view kind, const Table& table, Op first, std::string_view text) {
  std::string known;
  for (auto i = static_cast<size_t>(first); i < table.size(); ++i) {
    if (name(table[i]) == text) return static_cast<Op>(i);
    known.append(known.empty() ? "" : ", ").append(name(table[i]));
  }
  throw InvalidArgument("[" + std::string(kind) + "] op: expected one of " + known + ", got \"" +
                        std::string(text) + "\"");
}

}  // namespace

const UnaryOpNames& names(UnaryOp op) {
  return entry("unary", kUnaryOps, op);
}

std::string_view name(UnaryOp op) {
  return names(op).op;
}

std::string_view name(BinaryOp op) {
  return entry("binary", kBinaryOpNames, op);
}

UnaryOp parse_unary_op(std::string_view text) {
  return parse_from("unary", kUnaryOps, UnaryOp::scale, text);
}

UnaryOp parse_activation(std::string_view text) {
  return parse_from("unary", kUnaryOps, UnaryOp::silu, text);
}

BinaryOp parse_binary_op(std::string_view text) {
  return parse_from("binary", kBinaryOpNames, BinaryOp{}, text);
}

std::string describe(const UnaryProblem& problem) {
  return std::string("[").append(name(problem.op)).append("]") + field("rows", problem.rows) +
         field("cols", problem.cols);
}

std::string describe(const BinaryProblem& problem) {
  return std::string("[").append(name(problem.op)).append("]") + field("size", problem.size);
}

const char* rejects(const UnaryProblem& problem) {
  const bool known = static_cast<size_t>(problem.op) < kUnaryOps.size();
  return known && problem.op != UnaryOp::none ? nullptr : "has no operation";
}

Cost cost(const UnaryProblem& problem) {
  const int64_t size = problem.rows * problem.cols;
  return {size * 8, size};
}

Cost cost(const BinaryProblem& problem) {
  return {problem.size * 12, problem.size};
}

void unary(UnaryOp op, const TensorView& x, float parameter, float* out, const Executor& executor) {
  const Validator check(name(op), executor.device());
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
  run_rows(problem, executor);
}

void binary(BinaryOp op, const TensorView& a, const TensorView& b, float* out,
            const Executor& executor) {
  const Validator check(name(op), executor.device());
  check.dtype("a", a, DType::f32);
  check.dtype("b", b, DType::f32);
  check.shape("b", b, a.dims);
  check.data("out", out, a.dims);
  BinaryProblem problem;
  problem.op = op;
  problem.a = static_cast<const float*>(a.data);
  problem.b = static_cast<const float*>(b.data);
  problem.size = a.dims.num_elements();
  problem.out = out;
  run_rows(problem, executor);
}

}  // namespace effinfer::ops
