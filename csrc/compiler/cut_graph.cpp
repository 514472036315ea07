// A graph in two behind its first layers: before passes, which then see each half alone.
//
// The line lies between two nodes. Nodes of a layer have its number (attribute `layer`); those
// between the last one of a layer and the first one of the next, such as a feed-forward part and
// the next norm, may lie on either side. Of all lines there the one is taken that the fewest
// columns cross, and of these the last: where layers meet, the residual stream crosses alone.
#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>

#include "effinfer/compiler.h"
#include "effinfer/error.h"

namespace effinfer {
namespace {

bool has_layer(const Node& node) {
  const auto entry = node.attributes.find("layer");
  return entry != node.attributes.end() && std::holds_alternative<int64_t>(entry->second);
}

class Cutter {
 public:
  explicit Cutter(const Graph& graph)
      : graph_(graph), of_value_(graph.values.size(), -1), kinds_(graph.nodes.size()) {
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      kinds_[i] = kind_of(graph.nodes[i]);
      if (has_layer(graph.nodes[i])) {
        const int64_t layer = graph.nodes[i].get_int("layer");
        nodes_of_.emplace(layer, std::pair(i, i)).first->second.second = i;
      }
      for (const ValueId id : graph.nodes[i].outputs) {
        of_value_[static_cast<size_t>(id)] = static_cast<int>(i);
      }
    }
  }

  // The best line behind so many layers; none: 0.
  size_t find_line(size_t front_layers) const {
    size_t best = 0;
    int64_t fewest = std::numeric_limits<int64_t>::max();
    for (size_t line = 1; line < graph_.nodes.size(); ++line) {
      if (!divides_layers(line, front_layers)) continue;
      const int64_t columns = crossing_columns(line);
      if (columns < 0 || columns > fewest) continue;
      best = line;
      fewest = columns;
    }
    return best;
  }

  GraphHalves cut(size_t line) const {
    const std::vector<ValueId> crossing = crossing_at(line);
    GraphHalves halves;
    halves.front = half(graph_.name + ".front", {}, [&](size_t i) { return !in_back(i, line); });
    halves.front.outputs = crossing;
    for (const ValueId id : graph_.outputs) {
      const int node = of_value_[static_cast<size_t>(id)];
      const bool known = std::find(crossing.begin(), crossing.end(), id) != crossing.end();
      if (node >= 0 && !in_back(static_cast<size_t>(node), line)) {
        if (!known) halves.front.outputs.push_back(id);
      } else {
        halves.back.outputs.push_back(id);
      }
    }
    const std::vector<ValueId> outputs = std::move(halves.back.outputs);
    halves.back = half(graph_.name + ".back", crossing, [&](size_t i) {
      return in_back(i, line) || (kinds_[i] == Kind::repeated && is_read_behind(i, line));
    });
    halves.back.outputs = outputs;
    return halves;
  }

 private:
  enum class Kind : uint8_t {
    placed,    // on the side of the line on which it stands
    repeated,  // of the step's ids and vectors alone, such as rotary tables: on each side
    of_rows    // of rows whose logits are wanted, which are the back's
  };

  Kind kind_of(const Node& node) const {
    const auto& outputs = node.outputs;
    const auto of_rows = [&](ValueId id) {
      const Shape& shape = graph_.value(id).shape;
      return !shape.empty() && shape[0].kind == Dim::Kind::rows;
    };
    if (std::any_of(outputs.begin(), outputs.end(), of_rows)) return Kind::of_rows;
    const auto is_small = [&](ValueId id) {
      const Value& value = graph_.value(id);
      if (value.kind == Value::Kind::weight) return value.shape.size() == 1;
      if (value.kind == Value::Kind::input) return value.dtype == DType::i32;
      return kinds_[static_cast<size_t>(of_value_[static_cast<size_t>(id)])] == Kind::repeated;
    };
    const bool repeated =
        !has_layer(node) && std::all_of(node.inputs.begin(), node.inputs.end(), is_small);
    return repeated ? Kind::repeated : Kind::placed;
  }

  bool in_back(size_t node, size_t line) const {
    return kinds_[node] == Kind::of_rows || node >= line;
  }

  // Whether the line has the first `count` layers before it, whole, and the others behind it.
  bool divides_layers(size_t line, size_t count) const {
    size_t before = 0;
    for (const auto& [layer, nodes] : nodes_of_) {
      if (nodes.first < line && nodes.second >= line) return false;
      before += nodes.second < line ? 1 : 0;
    }
    return before == count;
  }

  bool is_read_behind(size_t node, size_t line) const {
    for (size_t i = node + 1; i < graph_.nodes.size(); ++i) {
      const bool behind =
          in_back(i, line) || (kinds_[i] == Kind::repeated && i < line && is_read_behind(i, line));
      if (behind && reads(graph_.nodes[i], graph_.nodes[node])) return true;
    }
    return false;
  }

  static bool reads(const Node& reader, const Node& maker) {
    return std::any_of(reader.inputs.begin(), reader.inputs.end(), [&](ValueId id) {
      return std::find(maker.outputs.begin(), maker.outputs.end(), id) != maker.outputs.end();
    });
  }

  // What the back reads of the front, in the order in which it is made.
  std::vector<ValueId> crossing_at(size_t line) const {
    std::set<std::pair<int, ValueId>> crossing;
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      if (!in_back(i, line)) continue;
      for (const ValueId id : graph_.nodes[i].inputs) {
        const int maker = of_value_[static_cast<size_t>(id)];
        if (maker < 0 || in_back(static_cast<size_t>(maker), line)) continue;
        if (kinds_[static_cast<size_t>(maker)] == Kind::placed) crossing.emplace(maker, id);
      }
    }
    std::vector<ValueId> values;
    for (const auto& [maker, id] : crossing) values.push_back(id);
    return values;
  }

  // -1 where something else than floats crosses.
  int64_t crossing_columns(size_t line) const {
    int64_t columns = 0;
    for (const ValueId id : crossing_at(line)) {
      const Value& value = graph_.value(id);
      const bool floats = value.dtype == DType::f32 && value.shape.size() == 2 &&
                          value.shape[0].kind == Dim::Kind::tokens &&
                          value.shape[1].kind == Dim::Kind::constant;
      if (!floats) return -1;
      columns += value.shape[1].value;
    }
    return columns;
  }

  // Those nodes, with the inputs and weights that they read.
  template <class IsIn>
  Graph half(const std::string& name, const std::vector<ValueId>& floats, IsIn is_in) const {
    Graph half;
    half.name = name;
    half.metadata = graph_.metadata;
    half.values = graph_.values;
    std::set<ValueId> read;
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      if (!is_in(i)) continue;
      half.nodes.push_back(graph_.nodes[i]);
      read.insert(graph_.nodes[i].inputs.begin(), graph_.nodes[i].inputs.end());
    }
    const auto is_read = [&](ValueId id) { return read.contains(id); };
    std::ranges::copy_if(graph_.inputs, std::back_inserter(half.inputs), is_read);
    std::ranges::copy_if(graph_.weights, std::back_inserter(half.weights), is_read);
    for (const ValueId id : floats) {
      half.values[static_cast<size_t>(id)].kind = Value::Kind::input;
      half.inputs.push_back(id);
    }
    return half;
  }

  const Graph& graph_;
  std::vector<int> of_value_;                              // the node that makes it, -1: none
  std::vector<Kind> kinds_;                                // of nodes
  std::map<int64_t, std::pair<size_t, size_t>> nodes_of_;  // of a layer: the first and the last
};

}  // namespace

std::vector<int32_t> layers_of(const Graph& graph) {
  std::vector<int32_t> layers;
  for (const Node& node : graph.nodes) {
    if (!has_layer(node)) continue;
    const auto layer = static_cast<int32_t>(node.get_int("layer"));
    if (std::find(layers.begin(), layers.end(), layer) == layers.end()) layers.push_back(layer);
  }
  return layers;
}

GraphHalves cut_graph(const Graph& graph, int32_t front_layers) {
  graph.verify();
  const auto layers = static_cast<int32_t>(layers_of(graph).size());
  if (layers < 2) {
    throw InvalidArgument("[cut_graph] graph: expected at least 2 layers, got " +
                          std::to_string(layers) + " in " + graph.name);
  }
  if (front_layers < 1 || front_layers >= layers) {
    throw InvalidArgument("[cut_graph] front_layers: expected 1.." + std::to_string(layers - 1) +
                          ", got " + std::to_string(front_layers));
  }
  const Cutter cutter(graph);
  const size_t line = cutter.find_line(static_cast<size_t>(front_layers));
  if (line == 0) {
    throw InvalidArgument("[cut_graph] graph: no line divides " + graph.name + " behind " +
                          std::to_string(front_layers) +
                          " layers, as later layers read the keys of earlier ones");
  }
  GraphHalves halves = cutter.cut(line);
  halves.front.verify();
  halves.back.verify();
  return halves;
}

}  // namespace effinfer
