// linear(x, w[, b])          ->  a = to_act(x); matmul(a, w[, b])
// ternary_linear(x, w[, b])  ->  the same, and a has {decode = prefill = "int8_token"}
//
// Matmul kernels read an operand (ops/operand.h), not floats. The conversion is a node of
// its own, shared by all linears of one x and kind; later passes move it into the node that makes
// x. The arithmetic of a ternary operand is part of the model: it is written here, and
// choose_arithmetic leaves it alone.
#include <map>
#include <utility>

#include "compiler/arithmetic.h"
#include "compiler/passes.h"
#include "compiler/rewriter.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {

void canonicalize(Graph& graph, const CompileOptions&) {
  std::map<std::pair<ValueId, bool>, ValueId> operands;
  std::vector<Node> nodes;
  for (Node& node : graph.nodes) {
    const bool ternary = node.op == "ternary_linear";
    if (node.op != "linear" && !ternary) {
      nodes.push_back(std::move(node));
      continue;
    }
    const ValueId x = node.inputs[0];
    auto entry = operands.find({x, ternary});
    if (entry == operands.end()) {
      const Value& value = graph.value(x);
      const std::string name = value.name + (ternary ? ".token_act" : ".act");
      const ValueId act = add_unique_value(graph, name, DType::act, Shape(value.shape));
      Node conversion{"to_act", {x}, {}, {act}};
      if (ternary) set_arithmetic(conversion, graph::kTernaryArithmetic, graph::kTernaryArithmetic);
      nodes.push_back(std::move(conversion));
      entry = operands.emplace(std::pair(x, ternary), act).first;
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
