#include "compiler/rewriter.h"

#include <algorithm>

#include "graph/text.h"

namespace effinfer::compiler {

Rewriter::Rewriter(Graph& graph)
    : graph_(graph), producers_(graph.values.size(), -1), users_(graph.values.size()) {
  for (int index = 0; index < size(); ++index) record(index);
}

int Rewriter::only_user(ValueId value, std::string_view op) const {
  const std::vector<int>& list = users(value);
  const auto& outputs = graph_.outputs;
  if (list.size() != 1 || !is(list[0], op)) return -1;
  return std::find(outputs.begin(), outputs.end(), value) == outputs.end() ? list[0] : -1;
}

int Rewriter::attention_of(ValueId value) const {
  const auto& outputs = graph_.outputs;
  if (std::find(outputs.begin(), outputs.end(), value) != outputs.end()) return -1;
  int attention = -1;
  for (const int user : users(value)) {
    const bool is_index = graph_.value(node(user).outputs[0]).dtype == DType::visits;
    if (is_index || is(user, "attention_mass")) continue;
    if (!is(user, "attention") || attention >= 0) return -1;
    attention = user;
  }
  return attention;
}

void Rewriter::record(int index) {
  for (const ValueId id : node(index).outputs) producers_[static_cast<size_t>(id)] = index;
  for (const ValueId id : node(index).inputs) {
    std::vector<int>& list = users_[static_cast<size_t>(id)];
    list.insert(std::upper_bound(list.begin(), list.end(), index), index);
  }
}

void Rewriter::forget(int index) {
  for (const ValueId id : node(index).outputs) {
    if (producer(id) == index) producers_[static_cast<size_t>(id)] = -1;
  }
  for (const ValueId id : node(index).inputs) {
    std::vector<int>& list = users_[static_cast<size_t>(id)];
    list.erase(std::find(list.begin(), list.end(), index));
  }
}

void Rewriter::erase(int index) {
  forget(index);
  graph_.nodes[static_cast<size_t>(index)] = Node{};
}

void Rewriter::replace(int index, Node fresh) {
  forget(index);
  graph_.nodes[static_cast<size_t>(index)] = std::move(fresh);
  record(index);
}

void Rewriter::set_attribute(int index, std::string_view key, Attribute value) {
  graph_.nodes[static_cast<size_t>(index)].attributes.insert_or_assign(std::string(key),
                                                                       std::move(value));
}

ValueId Rewriter::add_value(std::string_view name, DType dtype, Shape shape) {
  producers_.push_back(-1);
  users_.emplace_back();
  return add_unique_value(graph_, name, dtype, std::move(shape));
}

void Rewriter::finish() {
  std::erase_if(graph_.nodes, [](const Node& entry) { return entry.op.empty(); });
}

ValueId add_unique_value(Graph& graph, std::string_view name, DType dtype, Shape shape) {
  graph.values.push_back(
      Value{graph::unique_name(graph, name), dtype, std::move(shape), Value::Kind::node, ""});
  return static_cast<ValueId>(graph.values.size()) - 1;
}

}  // namespace effinfer::compiler
