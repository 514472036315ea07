#include "ops/matmul.h"

namespace effinfer::ops {

std::string describe(const MatmulProblem& problem) {
  std::string text = "[matmul] rows=" + std::to_string(problem.x.rows) +
                     " cols=" + std::to_string(problem.x.cols) +
                     " arithmetic=" + std::string(name(problem.x.arithmetic)) + " weights=";
  for (int i = 0; i < problem.num_parts; ++i) {
    const PackedWeight& weight = problem.parts[i].weight;
    if (i > 0) text += "+";
    text += std::string(name(weight.source)) + "[" + std::to_string(weight.rows) + "," +
            std::to_string(weight.cols) + "]";
  }
  if (problem.glu != UnaryOp::none) text.append(" glu=").append(name(problem.glu));
  if (problem.out_operand.data != nullptr) {
    text += " out=" + std::string(name(problem.out_operand.arithmetic)) + " operand";
  }
  return text;
}

Cost cost(const MatmulProblem& problem) {
  const int64_t rows = problem.x.rows;
  const bool gated = problem.glu != UnaryOp::none;
  Cost cost{rows * problem.x.row_bytes(), 0};
  for (int i = 0; i < problem.num_parts; ++i) {
    const MatmulPart& part = problem.parts[i];
    const int64_t outputs = part.weight.rows;
    const bool writes = i == 0 || !gated;
    cost.bytes += static_cast<int64_t>(part.weight.num_bytes());
    if (part.bias != nullptr) cost.bytes += outputs * 4;
    if (part.residual != nullptr) cost.bytes += rows * outputs * 4;
    if (writes && problem.out_operand.data == nullptr) cost.bytes += rows * outputs * 4;
    cost.ops += 2 * rows * outputs * part.weight.cols;
  }
  if (problem.out_operand.data != nullptr) cost.bytes += rows * problem.out_operand.row_bytes();
  return cost;
}

}  // namespace effinfer::ops
