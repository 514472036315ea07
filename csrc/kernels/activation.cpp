#include "kernels/activation.h"

namespace effinfer::kernels {

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

std::string describe(const ToActivationProblem& problem) {
  return "[to_activation] rows=" + std::to_string(problem.out.rows) +
         " cols=" + std::to_string(problem.out.cols) +
         " arithmetic=" + std::string(name(problem.out.arithmetic));
}

}  // namespace effinfer::kernels
