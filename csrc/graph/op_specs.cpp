#include "graph/op_specs.h"

#include <algorithm>
#include <array>

#include "effinfer/error.h"
#include "graph/op_inference.h"

namespace effinfer::graph {
namespace {

AttributeSpec integer(std::string_view name) {
  return {name, AttributeType::integer, {}};
}
AttributeSpec integer(std::string_view name, int64_t value) {
  return {name, AttributeType::integer, Attribute(value)};
}
AttributeSpec number(std::string_view name) {
  return {name, AttributeType::number, {}};
}
AttributeSpec number(std::string_view name, double value) {
  return {name, AttributeType::number, Attribute(value)};
}
AttributeSpec flag(std::string_view name, bool value) {
  return {name, AttributeType::boolean, Attribute(value)};
}
AttributeSpec text(std::string_view name) {
  return {name, AttributeType::string, {}};
}
AttributeSpec text(std::string_view name, const char* value) {
  return {name, AttributeType::string, Attribute(std::string(value))};
}
AttributeSpec integers(std::string_view name) {
  return {name, AttributeType::integers, Attribute(std::vector<int64_t>())};
}

// What a model definition writes.
std::vector<OpSpec> model_ops() {
  return {
      {"embedding", 2, 2, {number("scale", 1.0)}, infer_embedding},
      {"rms_norm",
       2,
       2,
       {number("eps"), integer("groups", 1), flag("as_operand", false)},
       infer_rms_norm,
       alias_unless_operand},
      {"linear", 2, 3, {}, infer_linear},
      {"ternary_linear", 2, 3, {}, infer_ternary_linear},
      {"rope_table",
       1,
       2,
       {integer("dims"), number("theta"), text("scaling", "none"), number("factor", 1.0),
        number("original_max_position", 0.0), number("low_freq_factor", 1.0),
        number("high_freq_factor", 4.0), number("beta_fast", 32.0), number("beta_slow", 1.0),
        number("attention_factor", 0.0)},
       infer_rope_table},
      {"rope",
       2,
       2,
       {integer("heads"), integer("head_dim"), flag("interleaved", false)},
       infer_rope,
       alias_first},
      {"kv_append",
       2,
       2,
       {integer("layer"), integer("heads"), integer("head_dim")},
       infer_kv_append},
      {"column_index",
       2,
       3,
       {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
        number("scale"), integer("last_rows", 64), integer("row_stride", 0), integer("columns", 0),
        number("column_mass", 0.0), integer("slashes", 0), number("slash_mass", 0.0),
        integer("sinks", 0), integer("window", 0), integer("min_tokens", 0), integers("only")},
       infer_column_index},
      {"block_index",
       2,
       3,
       {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
        number("scale"), integer("stride", 0), integer("pages", 0), number("mass", 0.0),
        integer("sinks", 0), integer("window", 0), integer("min_tokens", 0), integers("only")},
       infer_block_index},
      {"attention",
       2,
       3,
       {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
        number("scale"), integer("window", -1), integer("sinks", 0), number("soft_cap", 0.0),
        flag("as_operand", false)},
       infer_attention},
      {"silu", 1, 1, {}, infer_unary, alias_first},
      {"gelu_tanh", 1, 1, {}, infer_unary, alias_first},
      {"relu_squared", 1, 1, {}, infer_unary, alias_first},
      {"add", 2, 2, {}, infer_binary, alias_both},
      {"mul", 2, 2, {}, infer_binary, alias_both},
      {"scale", 1, 1, {number("factor")}, infer_unary, alias_first},
      {"softcap", 1, 1, {number("cap")}, infer_unary, alias_first},
      {"select_rows", 2, 2, {}, infer_select_rows},
  };
}

// What only passes write.
std::vector<OpSpec> pass_ops() {
  return {
      {"to_act", 1, 1, {}, infer_to_act},
      {"matmul",
       2,
       13,
       {integer("parts"), integers("bias"), integers("residual")},
       infer_matmul,
       alias_residuals},
      {"matmul_glu",
       3,
       5,
       {integer("parts", 2), integers("bias"), integers("residual"), text("activation"),
        flag("as_operand", false)},
       infer_matmul_glu},
      {"add_rms_norm",
       3,
       3,
       {number("eps"), flag("as_operand", false)},
       infer_add_rms_norm,
       alias_both},
      {"rope_append",
       3,
       6,
       {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
        flag("rope", false), flag("interleaved", false), flag("q_norm", false),
        flag("k_norm", false), number("eps", 0.0)},
       infer_rope_append},
  };
}

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

const std::vector<OpSpec>& all_ops() {
  static const std::vector<OpSpec> ops = [] {
    std::vector<OpSpec> all = model_ops();
    for (OpSpec& op : pass_ops()) all.push_back(std::move(op));
    return all;
  }();
  return ops;
}

const OpSpec* find_op(std::string_view name) {
  for (const OpSpec& op : all_ops()) {
    if (op.name == name) return &op;
  }
  return nullptr;
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
