#include "compiler/lowering.h"

#include <algorithm>

#include "compiler/arithmetic.h"
#include "compiler/kept_weights.h"
#include "compiler/memory_plan.h"
#include "effinfer/ops/elementwise.h"
#include "graph/op_specs.h"
#include "ops/history_index.h"
#include "ops/page_index.h"

namespace effinfer::compiler {
namespace {

// Of an index of generated rows: the scores of a page that it chooses by.
int32_t page_scores(const Node& node) {
  if (node.op == "key_index") return int32_t{ops::kPageSize};
  if (node.op == "history_index") return ops::kHistoryPageScores;
  if (node.op != "page_index") return 0;
  const bool means = node.get_string("score") == "means";
  return static_cast<int32_t>(ops::kPageSize / (means ? ops::kMeanUnit : node.get_int("unit")));
}

struct Rule {
  std::string_view op;
  void (*lower)(Lowering&, const Node&);
};

// The element-by-element operators come from their own tables.
std::vector<Rule> all_rules() {
  std::vector<Rule> rules = {
      {"embedding", lower_embedding},
      {"rms_norm", lower_rms_norm},
      {"add_rms_norm", lower_add_rms_norm},
      {"select_rows", lower_select_rows},
      {"rope_table", lower_rope_table},
      {"rope", lower_rope},
      {"kv_append", lower_kv_append},
      {"rope_append", lower_rope_append},
      {"attention", lower_attention},
      {"column_index", lower_column_index},
      {"block_index", lower_block_index},
      {"bucket_index", lower_bucket_index},
      {"page_index", lower_page_index},
      {"key_index", lower_key_index},
      {"hash_index", lower_hash_index},
      {"strided_index", lower_strided_index},
      {"history_index", lower_history_index},
      {"copy_index", lower_copy_index},  // lists lie where they are
      {"to_act", lower_to_operand},
      {"matmul", lower_matmul},
      {"attention_mass", lower_attention_mass},  // to planes of sequences
      {"matmul_glu", lower_matmul},
  };
  ops::for_unary_ops([&](ops::UnaryOp op) { rules.push_back({name(op), lower_unary}); });
  for (const std::string_view op : ops::kBinaryOpNames) rules.push_back({op, lower_binary});
  return rules;
}

const std::vector<Rule>& rules() {
  static const std::vector<Rule> all = all_rules();
  return all;
}

const Rule* find_rule(std::string_view op) {
  const auto rule = std::find_if(rules().begin(), rules().end(),
                                 [op](const Rule& candidate) { return candidate.op == op; });
  return rule == rules().end() ? nullptr : &*rule;
}

bool is_index(const Node& node) {
  return chooses_blocks(node) || chooses_rows(node);
}

void append(std::string& text, char separator, std::string_view more) {
  if (!text.empty()) text += separator;
  text += more;
}

// "blk.3.attn_q.weight" is "blk.attn_q".
std::string without_layer(std::string_view name) {
  if (name.ends_with(".weight")) name.remove_suffix(std::string_view(".weight").size());
  std::string out;
  while (!name.empty()) {
    const std::string_view part = name.substr(0, name.find('.'));
    name.remove_prefix(std::min(name.size(), part.size() + 1));
    const bool is_number = part.find_first_not_of("0123456789") == std::string_view::npos;
    if (!is_number) append(out, '.', part);
  }
  return out;
}

}  // namespace

std::vector<std::string_view> lowered_ops() {
  std::vector<std::string_view> names;
  for (const Rule& rule : rules()) names.push_back(rule.op);
  return names;
}

Lowering::Lowering(Shared& shared, Phase phase)
    : shared_(shared), phase_(phase), places_(shared.graph.values.size()) {
  program_.kept_heads = kept_heads(graph(), phase, target().device);
  for (const Node& node : graph().nodes) {
    const std::vector<int64_t>& arena = node.get_ints(graph::kArenaKey);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      Place& place = places_[static_cast<size_t>(node.outputs[i])];
      place.offset = arena[i];
      if (is_own(node)) place.own = node.get_ints(graph::kOwnKey)[i];
      if (graph().value(node.outputs[i]).dtype == DType::act) {
        place.arithmetic = parse_arithmetic(node.get_string(phase_key(phase)));
      }
    }
  }
}

Program Lowering::run() {
  for (const Node& node : graph().nodes) {
    const Rule* rule = find_rule(node.op);
    if (rule == nullptr) throw Unsupported("[compile] " + label(node) + ": no rule to run it");
    rule->lower(*this, node);
  }
  return std::move(program_);
}

Floats Lowering::floats(ValueId id) const {
  const Value& value = graph().value(id);
  for (const executor::InputBuffer& input : shared_.inputs) {
    if (value.kind == Value::Kind::input && value.name == input.name) return {input.values(), -1};
  }
  const Place& place = places_[static_cast<size_t>(id)];
  if (place.offset < 0) return {};
  return {reinterpret_cast<float*>(shared_.arena + place.offset), place.own};
}

OperandPlace Lowering::operand(ValueId id) const {
  const Place& place = places_[static_cast<size_t>(id)];
  return {{place.arithmetic, max_rows(id), cols(id), shared_.arena + place.offset}, place.own};
}

Ids Lowering::ids(ValueId id) const {
  const std::string& name = graph().value(id).name;
  if (name == "token_ids") return {&Batch::token_ids};
  if (name == "positions") return {&Batch::positions};
  if (name == "logit_rows") return {&Batch::logit_rows};
  throw InvalidArgument("[compile] input %" + name +
                        ": expected token_ids, positions or logit_rows");
}

int64_t Lowering::max_rows(ValueId id) const {
  return largest(rows(id), shared_.options);
}

size_t Lowering::attention_slot(const ops::AttentionShape& shape, size_t layer) {
  auto& shapes = shared_.attention_shapes;
  for (size_t slot = 0; slot < shapes.size(); ++slot) {
    if (shapes[slot] == shape && one_group(shared_.attention_layers[slot], layer)) return slot;
  }
  shapes.push_back(shape);
  shared_.attention_layers.push_back(layer);
  return shapes.size() - 1;
}

size_t Lowering::weight_slot(std::string_view plane) {
  auto& names = shared_.weight_names;
  const auto found = std::ranges::find(names, plane);
  if (found == names.end()) return names.emplace_back(plane), names.size() - 1;
  return static_cast<size_t>(found - names.begin());
}

const executor::HashConstants& Lowering::hash_constants(const ops::HashShape& shape,
                                                        int32_t head_dim, int64_t seed) {
  for (const executor::HashConstants& made : shared_.hash_constants) {
    if (made.shape == shape && made.head_dim == head_dim && made.seed == seed) return made;
  }
  const auto number = static_cast<uint64_t>(seed);
  return shared_.hash_constants.emplace_back(shape, head_dim, seed,
                                             constant(ops::hash_planes(shape, head_dim, number)),
                                             constant(ops::hash_chances(shape)));
}

bool Lowering::one_group(size_t layer, size_t other) const {
  const auto& groups = shared_.group_of_layer;
  return groups.empty() || groups[layer] == groups[other];
}

size_t Lowering::visited_layer(const Node& node) const {
  return static_cast<size_t>(is_index(node) ? graph().value(node.outputs[0]).shape[0].value
                                            : node.get_int("layer"));
}

ops::VisitShape Lowering::visit_shape(const Node& node) const {
  ops::VisitShape shape;
  shape.num_qo_heads = static_cast<int32_t>(node.get_int("heads"));
  shape.num_kv_heads = static_cast<int32_t>(node.get_int("kv_heads"));
  shape.blocks = false;
  for (const Node& index : graph().nodes) {
    if (!is_index(index) || visited_layer(index) != visited_layer(node)) continue;
    shape.rows |= chooses_rows(index);
    shape.blocks |= chooses_blocks(index);
    if (!weighs_keys(index)) continue;
    shape.row_weights |= chooses_rows(index);
    shape.block_weights |= chooses_blocks(index);
  }
  return shape;
}

size_t Lowering::visit_slot(const Node& node) {
  const ops::VisitShape shape = visit_shape(node);
  const size_t layer = visited_layer(node);
  auto& shapes = shared_.visit_shapes;
  size_t slot = 0;
  while (slot < shapes.size() &&
         !(shape.same_lists(shapes[slot]) && one_group(shared_.visit_layers[slot], layer))) {
    ++slot;
  }
  if (slot == shapes.size()) {
    shapes.push_back(shape);
    shared_.visit_layers.push_back(layer);
  }
  shapes[slot].columns |= node.op == "column_index";
  shapes[slot].buckets |= node.op == "bucket_index";
  shapes[slot].page_scores = std::max(shapes[slot].page_scores, page_scores(node));
  return slot;
}

std::string Lowering::label(const Node& node) const {
  std::string text;
  for (const ValueId id : node.outputs) {
    text += (text.empty() ? "%" : ", %") + graph().value(id).name;
  }
  return text + " = " + node.op;
}

// The weights without layer numbers, their sizes (inputs x outputs) and types; else the operator
// where the kernel's name does not tell it, and the heads or the columns.
std::string Lowering::what(const Node& node, std::string_view kernel) const {
  std::string names;
  std::string types;
  int64_t outputs = 0;
  int64_t inputs = 0;
  const auto add = [&](const Value& weight) {
    const std::string name = without_layer(weight.weight_name);
    const std::string_view last = std::string_view(name).substr(name.rfind('.') + 1);
    append(names, '+', names.empty() ? name : last);
    const std::string_view type = effinfer::name(weight.dtype);
    if (types.find(type) == std::string::npos) append(types, '+', type);
    outputs += weight.shape[0].value;
    if (weight.shape.size() == 2) inputs = weight.shape[1].value;
  };
  for (const size_t rank : {size_t{2}, size_t{1}}) {  // biases are not named beside matrices
    for (const ValueId id : node.inputs) {
      const Value& value = graph().value(id);
      const bool is_weight = value.kind == Value::Kind::weight && value.shape.size() == rank;
      if (is_weight && (rank == 2 || inputs == 0)) add(value);
    }
  }
  std::string text = names.empty() && !kernel.starts_with(node.op) ? node.op : names;
  if (!names.empty()) {
    append(text, ' ', inputs > 0 ? std::to_string(inputs) + 'x' + std::to_string(outputs) : types);
    if (inputs > 0) append(text, ' ', types);
  } else if (node.has("heads") && node.has("kv_heads")) {
    append(text, ' ', std::to_string(node.get_int("heads")));
    append(text, '/', std::to_string(node.get_int("kv_heads")));
    append(text, 'x', std::to_string(node.get_int("head_dim")));
  } else if (const Value& out = graph().value(node.outputs[0]); out.shape.size() == 2) {
    append(text, ' ', std::to_string(out.shape[1].value));
  }
  return text;
}

}  // namespace effinfer::compiler
