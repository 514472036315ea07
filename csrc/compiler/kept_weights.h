// What keys get of a step's rows (attention_mass nodes), where attention weighs the same keys for
// the same rows anyway: it keeps the weights of single rows, and a call behind it adds them up,
// without a product or an exponential more.
#pragma once

#include <cstdint>

#include "effinfer/compiler.h"
#include "effinfer/graph.h"

namespace effinfer::compiler {

// The node whose sums an attention node's weights make; null: none, or several.
const Node* mass_of_kept(const Graph& graph, const Node& attention);

// Query heads of the widest layer, where attention can keep the weights of every attention_mass
// node of the graph: a step's are all made in one way. 0: these make their own.
int64_t kept_heads(const Graph& graph, Phase phase, Device device);

}  // namespace effinfer::compiler
