#include <algorithm>

#include "effinfer/error.h"
#include "graph/op_specs.h"
#include "graph/text.h"

namespace effinfer {
namespace {

// A value's name from any text: other characters become '_'.
std::string sanitize(std::string_view text) {
  std::string out;
  for (const char c : text) out += graph::is_name_char(c) ? c : '_';
  if (out.empty() || !graph::is_name_start(out.front())) out.insert(out.begin(), '_');
  return out;
}

}  // namespace

GraphBuilder::GraphBuilder(std::string name) {
  graph_.name = std::move(name);
  if (!graph::is_name(graph_.name)) {
    throw InvalidArgument("[graph] name: expected letters, digits, _ and ., got \"" + graph_.name +
                          "\"");
  }
}

ValueId GraphBuilder::add_value(Value value) {
  value.name = graph::unique_name(graph_, value.name);
  graph_.values.push_back(std::move(value));
  return static_cast<ValueId>(graph_.values.size()) - 1;
}

ValueId GraphBuilder::input(std::string name, DType dtype, Shape shape) {
  if (!graph::is_name(name)) {
    throw InvalidArgument("[input] name: expected letters, digits, _ and ., got \"" + name + "\"");
  }
  for (const ValueId id : graph_.inputs) {
    if (graph_.value(id).name == name) {
      throw InvalidArgument("[input] name: \"" + name + "\" is taken");
    }
  }
  Value value{std::move(name), dtype, std::move(shape), Value::Kind::input, ""};
  graph_.inputs.push_back(add_value(std::move(value)));
  return graph_.inputs.back();
}

ValueId GraphBuilder::weight(std::string weight_name, DType dtype, const Dims& dims) {
  Shape shape;
  for (int axis = 0; axis < dims.rank(); ++axis) shape.push_back(Dim::constant(dims[axis]));
  for (const ValueId id : graph_.weights) {
    const Value& other = graph_.value(id);
    if (other.weight_name != weight_name) continue;
    if (other.dtype != dtype || other.shape != shape) {
      throw InvalidArgument("[weight] " + weight_name + ": expected the type of its first use, " +
                            graph::type_to_string(other));
    }
    return id;
  }
  // The name without the usual suffix reads better: %blk.0.attn_q.
  std::string_view stem = weight_name;
  if (stem.ends_with(".weight")) stem.remove_suffix(7);
  Value value{sanitize(stem), dtype, std::move(shape), Value::Kind::weight, weight_name};
  graph_.weights.push_back(add_value(std::move(value)));
  return graph_.weights.back();
}

std::vector<ValueId> GraphBuilder::node(std::string op, std::vector<ValueId> inputs,
                                        Attributes attributes) {
  for (const ValueId id : inputs) {
    if (id < 0 || static_cast<size_t>(id) >= graph_.values.size()) {
      throw InvalidArgument("[" + op + "] inputs: no value " + std::to_string(id));
    }
  }
  Node node{std::move(op), std::move(inputs), std::move(attributes), {}};
  graph::fill_defaults(node);
  const std::vector<graph::ValueType> types = graph::infer(graph_, node);
  const std::string base = node.op + "_" + std::to_string(graph_.nodes.size());
  for (const graph::ValueType& type : types) {
    node.outputs.push_back(add_value(Value{base, type.dtype, type.shape, Value::Kind::node, ""}));
  }
  graph_.nodes.push_back(std::move(node));
  return graph_.nodes.back().outputs;
}

void GraphBuilder::rename(ValueId id, std::string name) {
  const bool known = id >= 0 && static_cast<size_t>(id) < graph_.values.size();
  if (!known || graph_.value(id).kind != Value::Kind::node) {
    throw InvalidArgument("[rename] value: expected a node's, got " + std::to_string(id));
  }
  const bool taken = std::any_of(graph_.values.begin(), graph_.values.end(),
                                 [&](const Value& value) { return value.name == name; });
  if (!graph::is_name(name) || taken) {
    throw InvalidArgument("[rename] name: expected letters, digits, _ and ., and a name that no " +
                          std::string("other value has, got \"") + name + "\"");
  }
  graph_.values[static_cast<size_t>(id)].name = std::move(name);
}

void GraphBuilder::set_metadata(std::string key, Attribute value) {
  if (!graph::is_name(key)) {
    throw InvalidArgument("[metadata] key: expected letters, digits, _ and ., got \"" + key + "\"");
  }
  graph_.metadata.insert_or_assign(std::move(key), std::move(value));
}

Graph GraphBuilder::finish(std::vector<ValueId> outputs) {
  graph_.outputs = std::move(outputs);
  graph_.verify();
  return graph_;
}

}  // namespace effinfer
