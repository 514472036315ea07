#include "ops/operand.h"

namespace effinfer::ops {

std::string_view name(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::int8:
      return "int8";
    case Arithmetic::bf16:
      return "bf16";
    case Arithmetic::f32:
      return "f32";
    case Arithmetic::int8_token:
      return "int8_token";
  }
  return "?";
}

std::string describe(const ToOperandProblem& problem) {
  return "[to_operand] rows=" + std::to_string(problem.out.rows) +
         " cols=" + std::to_string(problem.out.cols) +
         " arithmetic=" + std::string(name(problem.out.arithmetic));
}

Cost cost(const ToOperandProblem& problem) {
  const Operand& out = problem.out;
  return {out.rows * (out.cols * 4 + out.row_bytes()), out.rows * out.cols * 3};
}

}  // namespace effinfer::ops
