// y = select_rows(f(a, b), r)  ->  y = f(select_rows(a, r), select_rows(b, r))
//
// for whatever works row by row and is used by nothing else, as far up as it goes: of the last
// layer, all that follows attention is computed for the rows whose logits are wanted only. That is
// one row of a prompt, or none of a chunk of it. A row's bits do not depend on the other rows.
#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compiler/passes.h"
#include "compiler/rewriter.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {
namespace {

class Hoist {
 public:
  explicit Hoist(Graph& graph) : graph_(graph), rewriter_(graph) {}

  void run() {
    find_hoisted();
    if (std::none_of(hoisted_.begin(), hoisted_.end(), [](bool is) { return is; })) return;
    std::vector<Node> nodes = std::exchange(graph_.nodes, {});
    for (size_t index = 0; index < nodes.size(); ++index) {
      Node& node = nodes[index];
      for (ValueId& input : node.inputs) input = current(input);
      if (node.op == "select_rows" && shrunk(node.inputs[0])) {
        renamed_[node.outputs[0]] = node.inputs[0];  // selected already
        continue;
      }
      if (hoisted_[index]) shrink(node);
      graph_.nodes.push_back(std::move(node));
    }
    for (ValueId& output : graph_.outputs) output = current(output);
  }

 private:
  // Row-wise nodes all of whose users are selections of the same rows, or such nodes themselves.
  void find_hoisted() {
    hoisted_.assign(static_cast<size_t>(rewriter_.size()), false);
    for (int index = rewriter_.size() - 1; index >= 0; --index) {
      const Node& node = rewriter_.node(index);
      if (node.op == "select_rows" && rows_ < 0) rows_ = node.inputs[1];
      if (!graph::spec_of(node).row_wise) continue;
      if (graph_.value(node.outputs[0]).shape[0].kind != Dim::Kind::tokens) continue;
      const std::vector<int>& users = rewriter_.users(node.outputs[0]);
      const auto& returned = graph_.outputs;
      hoisted_[static_cast<size_t>(index)] =
          !users.empty() &&
          std::find(returned.begin(), returned.end(), node.outputs[0]) == returned.end() &&
          std::all_of(users.begin(), users.end(), [this](int user) {
            const Node& other = rewriter_.node(user);
            return hoisted_[static_cast<size_t>(user)] ||
                   (other.op == "select_rows" && other.inputs[1] == rows_);
          });
    }
  }

  // The node on selected rows: of values that are computed for all tokens it reads a selection.
  void shrink(Node& node) {
    for (ValueId& input : node.inputs) {
      const Value& value = graph_.value(input);
      const bool all_tokens = value.dtype == DType::f32 && !value.shape.empty() &&
                              value.shape[0].kind == Dim::Kind::tokens;
      if (all_tokens) input = selection(input);
    }
    graph_.values[static_cast<size_t>(node.outputs[0])].shape[0] = Dim::rows();
  }

  ValueId selection(ValueId value) {
    const auto known = selections_.find(value);
    if (known != selections_.end()) return known->second;
    const Value& source = graph_.value(value);
    Shape shape = source.shape;
    shape[0] = Dim::rows();
    const ValueId rows = add_unique_value(graph_, source.name + ".rows", source.dtype, shape);
    graph_.nodes.push_back(Node{"select_rows", {value, rows_}, {}, {rows}});
    selections_[value] = rows;
    return rows;
  }

  bool shrunk(ValueId value) const { return graph_.value(value).shape[0].kind == Dim::Kind::rows; }
  ValueId current(ValueId value) const {
    const auto entry = renamed_.find(value);
    return entry == renamed_.end() ? value : entry->second;
  }

  Graph& graph_;
  const Rewriter rewriter_;
  std::vector<bool> hoisted_;
  ValueId rows_ = -1;  // the input that tells which rows
  std::unordered_map<ValueId, ValueId> selections_;
  std::unordered_map<ValueId, ValueId> renamed_;
};

}  // namespace

void hoist_select_rows(Graph& graph, const CompileOptions&) {
  Hoist(graph).run();
}

}  // namespace effinfer::compiler
