#include <unordered_set>

#include "effinfer/error.h"
#include "graph/op_specs.h"
#include "graph/text.h"

namespace effinfer {
namespace {

[[noreturn]] void fail(const std::string& message) {
  throw FormatError("[graph] " + message);
}

class Verifier {
 public:
  explicit Verifier(const Graph& graph) : graph_(graph), defined_(graph.values.size()) {}

  void run() {
    if (!graph::is_name(graph_.name)) fail("name: expected a name, got \"" + graph_.name + "\"");
    if (graph_.values.size() > graph::kMaxValues) fail("too many values");
    for (const auto& [key, value] : graph_.metadata) {
      if (!graph::is_name(key)) fail("meta: expected a name, got \"" + key + "\"");
    }
    for (const ValueId id : graph_.inputs) define(id, Value::Kind::input, "input");
    for (const ValueId id : graph_.weights) {
      define(id, Value::Kind::weight, "weight");
      check_weight(graph_.value(id));
    }
    for (size_t i = 0; i < graph_.nodes.size(); ++i) check_node(i);
    if (graph_.outputs.empty()) fail("expected at least one output");
    for (const ValueId id : graph_.outputs) {
      if (!is_defined(id)) fail("return: expected a defined value");
    }
  }

 private:
  bool in_range(ValueId id) const {
    return id >= 0 && static_cast<size_t>(id) < graph_.values.size();
  }
  bool is_defined(ValueId id) const { return in_range(id) && defined_[static_cast<size_t>(id)]; }

  void define(ValueId id, Value::Kind kind, const std::string& where) {
    if (!in_range(id)) fail(where + ": value " + std::to_string(id) + " does not exist");
    const Value& value = graph_.value(id);
    const std::string label = where + ": %" + value.name;
    if (!graph::is_name(value.name)) fail(label + ": expected a name");
    if (value.kind != kind) fail(label + ": is not of that kind");
    if (defined_[static_cast<size_t>(id)] || !names_.insert(value.name).second) {
      fail(label + " is defined twice");
    }
    if (value.shape.size() > static_cast<size_t>(kMaxRank)) fail(label + ": too many dimensions");
    for (const Dim& dim : value.shape) {
      if (dim.kind == Dim::Kind::constant && (dim.value < 0 || dim.value > graph::kMaxDim)) {
        fail(label + ": dimension " + dim.to_string() + " is out of range");
      }
    }
    defined_[static_cast<size_t>(id)] = true;
  }

  void check_weight(const Value& value) const {
    const std::string label = "weight %" + value.name;
    Dims dims;
    for (const Dim& dim : value.shape) {
      if (dim.kind != Dim::Kind::constant) fail(label + ": expected constant dimensions");
      dims.push_back(dim.value);
    }
    if (dtype_info(value.dtype).block_bytes == 0) {
      fail(label + ": " + std::string(effinfer::name(value.dtype)) + " cannot be stored");
    }
    try {
      TensorView{nullptr, value.dtype, dims}.num_bytes();
    } catch (const InvalidArgument& error) {
      fail(label + ": " + error.what());
    }
  }

  void check_node(size_t index) {
    const Node& node = graph_.nodes[index];
    const std::string label = describe(index);
    for (const ValueId id : node.inputs) {
      if (!is_defined(id)) {
        fail(label + ": uses " +
             (in_range(id) ? "%" + graph_.value(id).name : "value " + std::to_string(id)) +
             " before its definition");
      }
    }
    std::vector<graph::ValueType> types;
    try {
      types = graph::infer(graph_, node);
    } catch (const Error& error) {
      fail(label + ": " + error.what());
    }
    if (types.size() != node.outputs.size()) {
      fail(label + ": expected " + std::to_string(types.size()) + " results, got " +
           std::to_string(node.outputs.size()));
    }
    for (size_t i = 0; i < types.size(); ++i) {
      define(node.outputs[i], Value::Kind::node, label);
      const Value& value = graph_.value(node.outputs[i]);
      if (value.dtype != types[i].dtype || value.shape != types[i].shape) {
        const Value wanted{"", types[i].dtype, types[i].shape, Value::Kind::node, ""};
        fail(label + ": %" + value.name + ": expected " + graph::type_to_string(wanted) + ", got " +
             graph::type_to_string(value));
      }
    }
  }

  // "%x = rms_norm(...)" of the node, for messages.
  std::string describe(size_t index) const {
    const Node& node = graph_.nodes[index];
    std::string label = "node " + std::to_string(index) + " ";
    if (!node.outputs.empty() && in_range(node.outputs[0])) {
      label += "%" + graph_.value(node.outputs[0]).name + " = ";
    }
    return label + node.op;
  }

  const Graph& graph_;
  std::vector<bool> defined_;
  std::unordered_set<std::string> names_;
};

}  // namespace

void Graph::verify() const {
  Verifier(*this).run();
}

}  // namespace effinfer
