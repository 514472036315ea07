#include "kernels/matmul.h"

namespace effinfer::kernels {

std::string describe(const MatmulProblem& problem) {
  constexpr const char* kGlu[] = {"", " glu=silu", " glu=gelu_tanh"};
  std::string text = "[matmul] rows=" + std::to_string(problem.x.rows) +
                     " cols=" + std::to_string(problem.x.cols) +
                     " arithmetic=" + std::string(name(problem.x.arithmetic)) + " weights=";
  for (int i = 0; i < problem.num_parts; ++i) {
    const PackedWeight& weight = problem.parts[i].weight;
    if (i > 0) text += "+";
    text += std::string(name(weight.source)) + "[" + std::to_string(weight.rows) + "," +
            std::to_string(weight.cols) + "]";
  }
  text += kGlu[static_cast<int>(problem.glu)];
  if (problem.out_act.data != nullptr) {
    text += " out=" + std::string(name(problem.out_act.arithmetic)) + " operand";
  }
  return text;
}

}  // namespace effinfer::kernels
