// What keys get of a step's rows (attention_mass nodes), where attention multiplies the same rows
// and keys anyway: it keeps the weights of single rows, and whoever ends such a row adds its
// probabilities, without a call or a product more.
#pragma once

#include <cstdint>

#include "effinfer/compiler.h"
#include "effinfer/graph.h"
#include "ops/mass_rule.h"

namespace effinfer::compiler {

// Of an attention_mass node.
ops::MassRule mass_rule(const Node& node);

// The node whose sums an attention node can make; null: none, or several.
const Node* mass_in_attention(const Graph& graph, const Node& attention);

// Query heads of the widest layer, where attention can make the sums of every attention_mass node
// of the graph: a step's are all made in one way. 0: these are calls of their own.
int64_t kept_heads(const Graph& graph, Phase phase, Device device);

}  // namespace effinfer::compiler
