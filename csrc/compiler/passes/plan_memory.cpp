// Gives every value its place in the arena, at the largest step that the options allow: attribute
// `arena` has the offset of each result, -1 for what is not in the arena (the logits, which go
// straight to the caller, and handles). Metadata `arena_bytes` is the peak.
//
// A result shares the bytes of an input that dies there when the operator allows it (op_specs.cpp);
// such values form a chain that is placed as one block.
//
// Results of nodes that every member computes in a small step (fuse_regions) also get a place in a
// member's own arena, `own`, at a step of kOwnRows rows; metadata `own_bytes` is its peak. No
// barrier follows such a node, so its inputs stay as they are until the next node that has one.
#include <algorithm>

#include "compiler/memory_plan.h"
#include "compiler/passes.h"
#include "executor/program.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {
namespace {

class Planner {
 public:
  Planner(Graph& graph, const CompileOptions& options)
      : graph_(graph), options_(options), facts_(graph.values.size()) {}

  void run() {
    find_lifetimes();
    hold_inputs();
    for (size_t index = 0; index < graph_.nodes.size(); ++index) join_aliases(index);
    place_chains();
    place_own();
  }

 private:
  struct Facts {
    int first = -1;  // the node that makes it, -1: not made by a node
    int last = -1;   // the last node that uses it
    int held = -1;   // the node until whose end nothing may overwrite it
    int64_t bytes = 0;
    bool returned = false;
    ValueId chain = -1;  // the first value of its chain
    ValueId tail = -1;   // of a chain's first value: its last one so far
  };

  Facts& facts(ValueId id) { return facts_[static_cast<size_t>(id)]; }
  bool is_logits(ValueId id) const { return id == graph_.outputs[0] && returns_logits(graph_); }

  void find_lifetimes() {
    for (size_t index = 0; index < graph_.nodes.size(); ++index) {
      const Node& node = graph_.nodes[index];
      for (const ValueId id : node.inputs) facts(id).last = static_cast<int>(index);
      for (const ValueId id : node.outputs) {
        Facts& made = facts(id);
        made.first = made.last = static_cast<int>(index);
        made.bytes = largest_bytes(graph_.value(id), node, options_);
        made.chain = made.tail = id;
      }
    }
    // Logits go to the caller; other outputs stay in the arena to the end of the step.
    for (const ValueId id : graph_.outputs) {
      facts(id).returned = true;
      if (!is_logits(id)) facts(id).last = static_cast<int>(graph_.nodes.size()) - 1;
    }
  }

  static bool has_flag(const Node& node, std::string_view key) {
    return node.has(key) && node.get_bool(key);
  }

  void hold_inputs() {
    const int size = static_cast<int>(graph_.nodes.size());
    int barrier = size - 1;  // the next node that ends in one, seen from the end
    for (int index = size - 1; index >= 0; --index) {
      const Node& node = graph_.nodes[static_cast<size_t>(index)];
      if (!has_flag(node, graph::kEveryMemberKey) && !has_flag(node, graph::kInAttentionKey)) {
        barrier = index;
      }
      if (barrier == index) continue;
      // An append inside attention reads its inputs while attention writes its rows.
      const bool inside = has_flag(node, graph::kInAttentionKey);
      const int end = inside ? std::max(barrier, facts(node.outputs[0]).last) : barrier;
      for (const ValueId id : node.inputs) {
        const int from = facts(id).first;
        const bool own =
            from >= 0 && has_flag(graph_.nodes[static_cast<size_t>(from)], graph::kEveryMemberKey);
        if (!own || inside) facts(id).held = std::max(facts(id).held, end);
      }
    }
    for (Facts& value : facts_) value.last = std::max(value.last, value.held);
  }

  void join_aliases(size_t index) {
    const Node& node = graph_.nodes[index];
    const graph::OpSpec* spec = graph::find_op(node.op);
    if (spec == nullptr || spec->aliases == nullptr) return;
    for (const graph::Alias& alias : spec->aliases(node)) {
      const ValueId input = node.inputs[static_cast<size_t>(alias.input)];
      const ValueId output = node.outputs[static_cast<size_t>(alias.output)];
      const bool once = std::count(node.inputs.begin(), node.inputs.end(), input) == 1;
      if (once && may_share(input, output, static_cast<int>(index))) {
        Facts& chain = facts(facts(input).chain);
        chain.tail = output;
        facts(output).chain = facts(input).chain;
      }
    }
  }

  bool may_share(ValueId input, ValueId output, int index) {
    const Facts& from = facts(input);
    const Facts& to = facts(output);
    if (from.first < 0 || from.last != index || from.returned || from.bytes != to.bytes) {
      return false;
    }
    // What every member computes goes elsewhere in a small step.
    const Node& node = graph_.nodes[static_cast<size_t>(index)];
    if (from.held >= index && !has_flag(node, graph::kEveryMemberKey)) return false;
    // The input ends its chain, and the output has not joined another.
    return facts(from.chain).tail == input && to.chain == output;
  }

  void place_chains() {
    std::vector<ValueId> heads;
    std::vector<Lifetime> lifetimes;
    std::vector<int64_t> offsets(graph_.values.size(), -1);
    std::vector<size_t> slot(graph_.values.size());
    std::vector<bool> external(graph_.values.size(), false);
    const ValueId logits = graph_.outputs[0];
    if (facts(logits).first >= 0 && is_logits(logits))
      external[static_cast<size_t>(facts(logits).chain)] = true;
    for (const Node& node : graph_.nodes) {
      for (const ValueId id : node.outputs) {
        const Facts& value = facts(id);
        const auto chain = static_cast<size_t>(value.chain);
        if (value.bytes == 0 || external[chain]) continue;
        if (value.chain == id) {
          slot[chain] = lifetimes.size();
          lifetimes.push_back({value.first, value.last, value.bytes});
        }
        lifetimes[slot[chain]].last = std::max(lifetimes[slot[chain]].last, value.last);
      }
    }
    const ArenaPlan plan = plan_arena(lifetimes);
    for (Node& node : graph_.nodes) {
      std::vector<int64_t> arena;
      for (const ValueId id : node.outputs) {
        const Facts& value = facts(id);
        const auto chain = static_cast<size_t>(value.chain);
        const bool outside = value.bytes == 0 || external[chain];
        arena.push_back(outside ? -1 : plan.offsets[slot[chain]]);
      }
      node.attributes.insert_or_assign(std::string(graph::kArenaKey), std::move(arena));
    }
    graph_.metadata.insert_or_assign("arena_bytes", plan.bytes);
  }

  void place_own() {
    CompileOptions small = options_;
    small.max_tokens = std::min<int64_t>(small.max_tokens, executor::kOwnRows);
    small.max_rows = std::min<int64_t>(small.max_rows, executor::kOwnRows);
    std::vector<Lifetime> lifetimes;
    for (const Node& node : graph_.nodes) {
      if (!has_flag(node, graph::kEveryMemberKey)) continue;
      for (const ValueId id : node.outputs) {
        lifetimes.push_back(
            {facts(id).first, facts(id).last, largest_bytes(graph_.value(id), node, small)});
      }
    }
    const ArenaPlan plan = plan_arena(lifetimes);
    size_t next = 0;
    for (Node& node : graph_.nodes) {
      if (!has_flag(node, graph::kEveryMemberKey)) continue;
      std::vector<int64_t> own;
      for (size_t i = 0; i < node.outputs.size(); ++i) own.push_back(plan.offsets[next++]);
      node.attributes.insert_or_assign(std::string(graph::kOwnKey), std::move(own));
    }
    graph_.metadata.insert_or_assign("own_bytes", plan.bytes);
  }

  Graph& graph_;
  const CompileOptions& options_;
  std::vector<Facts> facts_;
};

}  // namespace

void plan_memory(Graph& graph, const CompileOptions& options) {
  Planner(graph, options).run();
}

}  // namespace effinfer::compiler
