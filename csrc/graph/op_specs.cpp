#include "graph/op_specs.h"

#include <algorithm>
#include <array>

#include "effinfer/error.h"

namespace effinfer::graph {
namespace {

bool is_type(const Attribute& attribute, AttributeType type) {
  switch (type) {
    case AttributeType::integer:
      return std::holds_alternative<int64_t>(attribute);
    case AttributeType::number:
      return std::holds_alternative<double>(attribute);
    case AttributeType::boolean:
      return std::holds_alternative<bool>(attribute);
    case AttributeType::string:
      return std::holds_alternative<std::string>(attribute);
    case AttributeType::integers:
      return std::holds_alternative<std::vector<int64_t>>(attribute);
  }
  return false;
}

const char* type_name(AttributeType type) {
  static constexpr std::array<const char*, 5> kNames = {"an integer", "a float", "a bool",
                                                        "a string", "a list of integers"};
  return kNames[static_cast<size_t>(type)];
}

// The annotations of passes, which any op may carry.
const std::vector<AttributeSpec>& annotations() {
  static const std::vector<AttributeSpec> specs = {
      {kArenaKey, AttributeType::integers, {}},
      {kOwnKey, AttributeType::integers, {}},
      {kEveryMemberKey, AttributeType::boolean, {}},
      {kInAttentionKey, AttributeType::boolean, {}},
      {kDecodeKey, AttributeType::string, {}},
      {kPrefillKey, AttributeType::string, {}},
      {kPrefillProductsKey, AttributeType::string, {}},
      {kPrefillWeightsKey, AttributeType::string, {}},
      {kPrefillSumsKey, AttributeType::string, {}},
  };
  return specs;
}

const AttributeSpec* find_attribute(const std::vector<AttributeSpec>& specs,
                                    std::string_view name) {
  for (const AttributeSpec& spec : specs) {
    if (spec.name == name) return &spec;
  }
  return nullptr;
}

std::optional<size_t> position_of(const std::vector<int64_t>& list, size_t part, size_t first) {
  const auto entry = std::find(list.begin(), list.end(), static_cast<int64_t>(part));
  if (entry == list.end()) return std::nullopt;
  return first + static_cast<size_t>(entry - list.begin());
}

void check_attributes(const OpSpec& spec, const OpContext& context) {
  for (const auto& [key, value] : context.node().attributes) {
    const AttributeSpec* attribute = find_attribute(spec.attributes, key);
    if (attribute == nullptr) attribute = find_attribute(annotations(), key);
    if (attribute == nullptr) context.fail(key, "no such attribute", "one");
    if (!is_type(value, attribute->type)) {
      context.fail(key, type_name(attribute->type), "another type");
    }
  }
  for (const AttributeSpec& attribute : spec.attributes) {
    if (!context.node().has(attribute.name)) {
      context.fail(attribute.name, type_name(attribute.type), "none");
    }
  }
}

}  // namespace

const OpSpec* find_op(std::string_view name) {
  for (const OpSpec& op : all_ops()) {
    if (op.name == name) return &op;
  }
  return nullptr;
}

const OpSpec& spec_of(const Node& node) {
  const OpSpec* spec = find_op(node.op);
  if (spec == nullptr) throw FormatError("[graph] op: \"" + node.op + "\" is unknown");
  return *spec;
}

void fill_defaults(Node& node) {
  const OpSpec* spec = find_op(node.op);
  if (spec == nullptr) return;
  for (const AttributeSpec& attribute : spec->attributes) {
    const auto entry = node.attributes.find(attribute.name);
    if (entry == node.attributes.end()) {
      if (attribute.default_value) {
        node.attributes.emplace(attribute.name, *attribute.default_value);
      }
    } else if (attribute.type == AttributeType::number &&
               std::holds_alternative<int64_t>(entry->second)) {
      entry->second = static_cast<double>(std::get<int64_t>(entry->second));
    }
  }
}

std::vector<ValueType> infer(const Graph& graph, const Node& node) {
  const OpSpec* spec = find_op(node.op);
  if (spec == nullptr) {
    std::string known;
    for (const OpSpec& op : all_ops()) known += (known.empty() ? "" : ", ") + std::string(op.name);
    throw InvalidArgument("[graph] op: expected one of " + known + ", got \"" + node.op + "\"");
  }
  const OpContext context(graph, node);
  const size_t count = node.inputs.size();
  if (count < spec->min_inputs || count > spec->max_inputs) {
    const std::string least = std::to_string(spec->min_inputs);
    const std::string most = std::to_string(spec->max_inputs);
    context.fail("inputs", least == most ? least : least + " to " + most, std::to_string(count));
  }
  check_attributes(*spec, context);
  return spec->infer(context);
}

MatmulInputs matmul_inputs(const Node& node) {
  MatmulInputs inputs;
  inputs.parts = static_cast<size_t>(node.get_int("parts"));
  inputs.bias_parts = node.get_ints("bias");
  inputs.residual_parts = node.get_ints("residual");
  return inputs;
}

std::optional<size_t> MatmulInputs::bias(size_t part) const {
  return position_of(bias_parts, part, 1 + parts);
}

std::optional<size_t> MatmulInputs::residual(size_t part) const {
  return position_of(residual_parts, part, 1 + parts + bias_parts.size());
}

RopeAppendInputs rope_append_inputs(const Node& node) {
  RopeAppendInputs inputs;
  if (node.get_bool("rope")) inputs.table = inputs.count++;
  if (node.get_bool("q_norm")) inputs.q_norm = inputs.count++;
  if (node.get_bool("k_norm")) inputs.k_norm = inputs.count++;
  return inputs;
}

AttentionInputs attention_inputs(const Node& node) {
  AttentionInputs inputs;
  size_t count = node.inputs.size();
  if (node.get_int("chunk") > 0) {
    inputs.q_far = --count;
    inputs.q_before = --count;
  }
  if (count == 3) inputs.visits = 2;
  return inputs;
}

bool is_ternary_operand(const Node& node) {
  return node.has(kDecodeKey) && node.get_string(kDecodeKey) == kTernaryArithmetic;
}

}  // namespace effinfer::graph

namespace effinfer {

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const graph::OpSpec& op : graph::all_ops()) names.emplace_back(op.name);
  return names;
}

}  // namespace effinfer
