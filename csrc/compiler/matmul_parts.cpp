#include "compiler/matmul_parts.h"

#include "graph/op_specs.h"

namespace effinfer::compiler {

MatmulParts MatmulParts::from(const Node& node) {
  const graph::MatmulInputs inputs = graph::matmul_inputs(node);
  MatmulParts matmul{node.inputs[0], {}};
  for (size_t i = 0; i < inputs.parts; ++i) {
    Part part{node.inputs[inputs.weight(i)], {}, {}, node.outputs[i]};
    if (const auto bias = inputs.bias(i)) part.bias = node.inputs[*bias];
    if (const auto residual = inputs.residual(i)) part.residual = node.inputs[*residual];
    matmul.parts.push_back(part);
  }
  return matmul;
}

Node MatmulParts::to_node(std::string op) const {
  Node node{std::move(op), {x}, {}, {}};
  std::vector<int64_t> bias;
  std::vector<int64_t> residual;
  for (const Part& part : parts) {
    node.inputs.push_back(part.weight);
    node.outputs.push_back(part.output);
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].bias) continue;
    bias.push_back(static_cast<int64_t>(i));
    node.inputs.push_back(*parts[i].bias);
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].residual) continue;
    residual.push_back(static_cast<int64_t>(i));
    node.inputs.push_back(*parts[i].residual);
  }
  node.attributes["parts"] = static_cast<int64_t>(parts.size());
  node.attributes["bias"] = std::move(bias);
  node.attributes["residual"] = std::move(residual);
  return node;
}

}  // namespace effinfer::compiler
