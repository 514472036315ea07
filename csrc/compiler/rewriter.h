// What passes are written with: who makes a value, who uses it, and edits in place.
//
// Node numbers stay valid through a pass: an erased node leaves a hole until finish(). A fused node
// takes the place of one of the nodes that it stands for, and makes the very values that the last
// of them made, so that uses seldom need to change.
#pragma once

#include <string_view>
#include <vector>

#include "effinfer/graph.h"

namespace effinfer::compiler {

class Rewriter {
 public:
  explicit Rewriter(Graph& graph);

  int size() const { return static_cast<int>(graph_.nodes.size()); }
  const Graph& graph() const { return graph_; }
  const Node& node(int index) const { return graph_.nodes[static_cast<size_t>(index)]; }
  bool is(int index, std::string_view op) const { return index >= 0 && node(index).op == op; }

  // The node that makes a value; -1 for inputs and weights.
  int producer(ValueId value) const { return producers_[static_cast<size_t>(value)]; }
  // The nodes that use a value, in order, one entry a use.
  const std::vector<int>& users(ValueId value) const { return users_[static_cast<size_t>(value)]; }
  // The node that alone uses the value, if it is an `op`; else -1. What the graph returns has a
  // user outside.
  int only_user(ValueId value, std::string_view op) const;
  // The one attention that uses the value, if nothing else does but the indices that choose its
  // keys; else -1.
  int attention_of(ValueId value) const;

  void erase(int index);
  void replace(int index, Node node);
  void set_attribute(int index, std::string_view key, Attribute value);
  // A new value for a node that a pass makes; the name is made unique.
  ValueId add_value(std::string_view name, DType dtype, Shape shape);

  // Closes the holes. Call once, at the end.
  void finish();

 private:
  void forget(int index);
  void record(int index);

  Graph& graph_;
  std::vector<int> producers_;
  std::vector<std::vector<int>> users_;
};

// Adds a value whose name is `name`, or `name_1`, ... when that is taken.
ValueId add_unique_value(Graph& graph, std::string_view name, DType dtype, Shape shape);

}  // namespace effinfer::compiler
