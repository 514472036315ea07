#include "compiler/kept_weights.h"

#include <algorithm>

#include "graph/op_specs.h"

namespace effinfer::compiler {
namespace {

bool shares_weights(const Node& mass, const Node& attention) {
  return attention.op == "attention" && !graph::attention_inputs(attention).visits &&
         attention.inputs[0] == mass.inputs[0] &&
         attention.get_int("layer") == mass.get_int("layer") &&
         attention.get_int("window_left") < 0 &&
         attention.get_float("sm_scale") == mass.get_float("sm_scale") &&
         attention.get_float("logits_soft_cap") == 0.0 && attention.get_string("weights").empty() &&
         mass.get_float("noise") == 0.0;
}

}  // namespace

const Node* mass_of_kept(const Graph& graph, const Node& attention) {
  const Node* found = nullptr;
  for (const Node& node : graph.nodes) {
    if (node.op != "attention_mass" || node.inputs[0] != attention.inputs[0]) continue;
    if (found != nullptr || !shares_weights(node, attention)) return nullptr;
    found = &node;
  }
  return found;
}

int64_t kept_heads(const Graph& graph, Phase phase, Device device) {
  // Rows of prompts are summed in tiles, alone or not.
  if (device.kind != DeviceKind::cpu || phase == Phase::prefill) return 0;
  int64_t heads = 0;
  for (const Node& mass : graph.nodes) {
    if (mass.op != "attention_mass") continue;
    const bool made = std::ranges::any_of(graph.nodes, [&](const Node& node) {
      return node.op == "attention" && mass_of_kept(graph, node) == &mass;
    });
    if (!made) return 0;
    heads = std::max(heads, mass.get_int("heads"));
  }
  return heads;
}

}  // namespace effinfer::compiler
