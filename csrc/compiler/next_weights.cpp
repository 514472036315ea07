#include "compiler/next_weights.h"

#include <algorithm>
#include <iterator>

namespace effinfer::compiler {
namespace {

bool is_matmul(const Node& node) {
  return node.op == "matmul" || node.op == "matmul_glu";
}

}  // namespace

const Node* next_matmul(const Graph& graph, const Node& node) {
  const auto here = graph.nodes.begin() + (&node - graph.nodes.data());
  const auto before =
      std::find_if(std::make_reverse_iterator(here), graph.nodes.rend(),
                   [](const Node& other) { return is_matmul(other) || other.op == "attention"; });
  if (before == graph.nodes.rend() || is_matmul(*before)) return nullptr;
  const auto next = std::find_if(here + 1, graph.nodes.end(), is_matmul);
  return next == graph.nodes.end() ? nullptr : &*next;
}

}  // namespace effinfer::compiler
