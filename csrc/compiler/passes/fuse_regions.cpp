// Marks the nodes that need no barrier of their own in a step of few tokens:
//
//   every_member = true   a node whose rows are cheap (norms, activations, ...). Each thread
//   computes
//                         all rows itself, on memory of its own, and goes on at once.
//   in_attention = true   a rope_append that only one attention reads, and in some steps what
//                         chooses or scores its keys: the items of attention rotate and append
//                         their own rows.
//
// A row costs less than a barrier, and the results are the same bits. What is left a layer of llama
// or gemma3 is five calls: q/k/v, attention, output, gate/up, down. plan_memory keeps the inputs of
// marked nodes until the next call that does end in a barrier.
#include <vector>

#include "compiler/passes.h"
#include "compiler/rewriter.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {
namespace {

// What the graph returns, and what becomes that row by row, is written once and not by everyone.
std::vector<bool> find_returned(const Rewriter& rewriter) {
  std::vector<bool> returned(static_cast<size_t>(rewriter.size()), false);
  std::vector<ValueId> pending = rewriter.graph().outputs;
  while (!pending.empty()) {
    const int index = rewriter.producer(pending.back());
    pending.pop_back();
    if (index < 0 || returned[static_cast<size_t>(index)]) continue;
    returned[static_cast<size_t>(index)] = true;
    const Node& node = rewriter.node(index);
    if (graph::spec_of(node).cheap)
      pending.insert(pending.end(), node.inputs.begin(), node.inputs.end());
  }
  return returned;
}

}  // namespace

void fuse_regions(Graph& graph, const CompileOptions&) {
  Rewriter rewriter(graph);
  const std::vector<bool> returned = find_returned(rewriter);
  for (int index = 0; index < rewriter.size(); ++index) {
    const Node& node = rewriter.node(index);
    if (graph::spec_of(node).cheap) {
      if (!returned[static_cast<size_t>(index)]) {
        rewriter.set_attribute(index, graph::kEveryMemberKey, true);
      }
    } else if (node.op == "rope_append" && rewriter.attention_of(node.outputs[0]) >= 0 &&
               rewriter.attention_of(node.outputs[1]) >= 0) {
      rewriter.set_attribute(index, graph::kInAttentionKey, true);
    }
  }
  rewriter.finish();
}

}  // namespace effinfer::compiler
