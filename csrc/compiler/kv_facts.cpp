#include "compiler/kv_facts.h"

#include <algorithm>
#include <map>
#include <variant>

#include "graph/op_specs.h"
#include "ops/rope.h"

namespace effinfer::compiler {
namespace {

const Node* producer(const Graph& graph, ValueId id) {
  for (const Node& node : graph.nodes) {
    if (std::ranges::find(node.outputs, id) != node.outputs.end()) return &node;
  }
  return nullptr;
}

RopeParameters rope_parameters(const Node& node) {
  const auto number = [&](std::string_view key) { return static_cast<float>(node.get_float(key)); };
  RopeParameters p;
  p.scaling = parse_rope_scaling(node.get_string("scaling"));
  p.theta = number("theta");
  p.dims = static_cast<int32_t>(node.get_int("dims"));
  p.factor = number("factor");
  p.original_max_position = number("original_max_position");
  p.low_freq_factor = number("low_freq_factor");
  p.high_freq_factor = number("high_freq_factor");
  p.beta_fast = number("beta_fast");
  p.beta_slow = number("beta_slow");
  p.attention_factor = number("attention_factor");
  return p;
}

bool appends(const Node& node) {
  return node.op == "kv_append" || node.op == "rope_append";
}

// The node that rotates what `append` writes, and its input with the table: null without rotation.
struct Rotation {
  const Node* node = nullptr;
  ValueId table = -1;
  bool known = true;
};
Rotation rotation_of(const Graph& graph, const Node& append) {
  if (append.op == "rope_append") {
    const auto table = graph::rope_append_inputs(append).table;
    if (!table) return {};
    return {&append, append.inputs[*table], true};
  }
  const Node* made = producer(graph, append.inputs[0]);
  if (made == nullptr || made->op != "rope") return {nullptr, -1, false};
  return {made, made->inputs[1], true};
}

// Whether attention, or its index, reads only keys that its window shows, if it has one.
bool reads_window(const Node& node) {
  return node.has("window_left") && node.get_int("sink_tokens") == 0;
}

// How many neighbouring layers without a window have a page table of their own; 0: they share one.
size_t layers_of_table(const Graph& graph) {
  int64_t least = 0;
  for (const auto& [key, value] : graph.metadata) {
    if (!key.starts_with("technique.") || !key.ends_with(".layer_groups")) continue;
    const int64_t* layers = std::get_if<int64_t>(&value);
    if (layers == nullptr || *layers < 0) continue;  // techniques_of() throws for it
    if (*layers > 0) least = least == 0 ? *layers : std::min(least, *layers);
  }
  return static_cast<size_t>(least);
}

std::vector<KvGroup> parts_of(const KvGroup& group, size_t layers) {
  std::vector<KvGroup> parts;
  const size_t count = group.layers.size();
  for (size_t first = 0; first < count; first += layers) {
    const auto begin = group.layers.begin() + static_cast<ptrdiff_t>(first);
    const auto end = begin + static_cast<ptrdiff_t>(std::min(layers, count - first));
    parts.push_back({{begin, end}, group.window_left});
  }
  return parts;
}

}  // namespace

RopeFrequencies rope_frequencies(const Graph& graph, const weights::WeightStore& weights,
                                 const Node& rope_table) {
  const RopeParameters parameters = rope_parameters(rope_table);
  std::vector<float> divisors;
  if (rope_table.inputs.size() == 2) {
    divisors = weights.host_floats(graph.value(rope_table.inputs[1]));
  }
  RopeFrequencies made;
  made.inv_freq.resize(static_cast<size_t>(parameters.dims / 2));
  made.factor = ops::rope_inv_freq(parameters, divisors.empty() ? nullptr : divisors.data(),
                                   made.inv_freq.data());
  return made;
}

std::vector<KvGroup> kv_groups(const Graph& graph, int32_t num_layers) {
  constexpr int64_t kAll = -1;
  std::vector<int64_t> windows(static_cast<size_t>(num_layers), 0);
  std::vector<bool> read(windows.size(), false);
  std::vector<bool> indexed(windows.size(), false);
  for (const Node& node : graph.nodes) {
    if (!node.has("layer") || appends(node)) continue;
    const auto layer = static_cast<size_t>(node.get_int("layer"));
    const int64_t window = reads_window(node) ? node.get_int("window_left") : kAll;
    int64_t& widest = windows[layer];
    widest = window == kAll || (widest == kAll && read[layer]) ? kAll : std::max(widest, window);
    read[layer] = true;
    indexed[layer] = indexed[layer] || node.op == "page_index";
  }
  std::map<int64_t, KvGroup> groups;
  for (size_t layer = 0; layer < windows.size(); ++layer) {
    const int64_t window = read[layer] ? windows[layer] : kAll;
    KvGroup& group = groups[window];
    group.window_left = static_cast<int32_t>(window);
    group.indexed = group.indexed || indexed[layer];
    group.layers.push_back(static_cast<int32_t>(layer));
  }
  if (!groups.contains(kAll)) return {};
  const size_t together = layers_of_table(graph);
  std::vector<KvGroup> all =
      together == 0 ? std::vector<KvGroup>{groups[kAll]} : parts_of(groups[kAll], together);
  groups.erase(kAll);
  for (auto& [window, group] : groups) all.push_back(std::move(group));
  return all.size() < 2 ? std::vector<KvGroup>() : all;
}

bool asks_for_tables(const Graph& graph) {
  return layers_of_table(graph) > 0;
}

std::vector<KvRope> kv_ropes(const Graph& graph, const weights::WeightStore& weights,
                             int32_t num_layers) {
  std::vector<KvRope> ropes(static_cast<size_t>(num_layers));
  for (const Node& node : graph.nodes) {
    if (!appends(node)) continue;
    const Rotation rotation = rotation_of(graph, node);
    if (!rotation.known) return {};
    if (rotation.node == nullptr) continue;
    const Node* table = producer(graph, rotation.table);
    if (table == nullptr || table->op != "rope_table") return {};
    KvRope& rope = ropes[static_cast<size_t>(node.get_int("layer"))];
    rope.inv_freq = rope_frequencies(graph, weights, *table).inv_freq;
    rope.interleaved = rotation.node->get_bool("interleaved");
  }
  return ropes;
}

}  // namespace effinfer::compiler
