// linear(x, w[, b])  ->  a = to_act(x); matmul(a, w[, b])
//
// Matmul kernels read an operand (kernels/activation.h), not floats. The conversion is a node of
// its own, shared by all linears of one x; later passes move it into the node that makes x.
#include <unordered_map>

#include "compiler/passes.h"
#include "compiler/rewriter.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {

void canonicalize(Graph& graph, const CompileOptions&) {
  std::unordered_map<ValueId, ValueId> operands;
  std::vector<Node> nodes;
  for (Node& node : graph.nodes) {
    if (node.op != "linear") {
      nodes.push_back(std::move(node));
      continue;
    }
    const ValueId x = node.inputs[0];
    auto entry = operands.find(x);
    if (entry == operands.end()) {
      const Value& value = graph.value(x);
      const std::string name = value.name + ".act";
      const ValueId act = add_unique_value(graph, name, DType::act, Shape(value.shape));
      nodes.push_back(Node{"to_act", {x}, {}, {act}});
      entry = operands.emplace(x, act).first;
    }
    Node matmul{"matmul", node.inputs, {{"parts", int64_t{1}}}, node.outputs};
    matmul.inputs[0] = entry->second;
    if (node.inputs.size() == 3) matmul.attributes["bias"] = std::vector<int64_t>{0};
    graph::fill_defaults(matmul);
    nodes.push_back(std::move(matmul));
  }
  graph.nodes = std::move(nodes);
}

}  // namespace effinfer::compiler
