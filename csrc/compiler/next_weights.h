// Which weights a GPU may ask for ahead.
#pragma once

#include "effinfer/graph.h"

namespace effinfer::compiler {

// The matmul behind `node`, if that is the first one behind an attention; else null. Calls run in
// the order of the nodes: while attention runs, which reads no weights, memory can bring those of
// the matmul that waits for it, which are on their way anyway, and then some of these. `node` is
// one of the graph's.
const Node* next_matmul(const Graph& graph, const Node& node);

}  // namespace effinfer::compiler
