#include "compiler/lowering.h"

#include <array>

#include "compiler/arithmetic.h"
#include "compiler/memory_plan.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {
namespace {

struct Rule {
  std::string_view op;
  void (*lower)(Lowering&, const Node&);
};

constexpr std::array kRules = {
    Rule{"embedding", lower_embedding},
    Rule{"rms_norm", lower_rms_norm},
    Rule{"add_rms_norm", lower_add_rms_norm},
    Rule{"silu", lower_unary},
    Rule{"gelu_tanh", lower_unary},
    Rule{"relu_squared", lower_unary},
    Rule{"scale", lower_unary},
    Rule{"softcap", lower_unary},
    Rule{"add", lower_binary},
    Rule{"mul", lower_binary},
    Rule{"select_rows", lower_select_rows},
    Rule{"rope_table", lower_rope_table},
    Rule{"rope", lower_rope},
    Rule{"kv_append", lower_kv_append},
    Rule{"rope_append", lower_rope_append},
    Rule{"attention", lower_attention},
    Rule{"to_act", lower_to_act},
    Rule{"matmul", lower_matmul},
    Rule{"matmul_glu", lower_matmul},
};

}  // namespace

Lowering::Lowering(Shared& shared, Phase phase)
    : shared_(shared), places_(shared.graph.values.size()) {
  for (const Node& node : graph().nodes) {
    const std::vector<int64_t>& arena = node.get_ints(graph::kArenaKey);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      Place& place = places_[static_cast<size_t>(node.outputs[i])];
      place.offset = arena[i];
      if (graph().value(node.outputs[i]).dtype == DType::act) {
        place.arithmetic = parse_arithmetic(node.get_string(phase_key(phase)));
      }
    }
  }
}

Program Lowering::run() {
  for (const Node& node : graph().nodes) {
    const Rule* found = nullptr;
    for (const Rule& rule : kRules) {
      if (rule.op == node.op) found = &rule;
    }
    if (found == nullptr) throw Unsupported("[compile] " + label(node) + ": no rule to run it");
    found->lower(*this, node);
  }
  return std::move(program_);
}

Floats Lowering::floats(ValueId id) const {
  const int64_t offset = places_[static_cast<size_t>(id)].offset;
  return {offset < 0 ? nullptr : reinterpret_cast<float*>(shared_.arena + offset)};
}

kernels::Activation Lowering::operand(ValueId id) const {
  const Place& place = places_[static_cast<size_t>(id)];
  return {place.arithmetic, max_rows(id), cols(id), shared_.arena + place.offset};
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

size_t Lowering::attention_slot(const kernels::AttentionShape& shape) {
  auto& shapes = shared_.attention_shapes;
  for (size_t slot = 0; slot < shapes.size(); ++slot) {
    const kernels::AttentionShape& other = shapes[slot];
    if (other.num_qo_heads == shape.num_qo_heads && other.num_kv_heads == shape.num_kv_heads &&
        other.head_dim == shape.head_dim && other.window_left == shape.window_left) {
      return slot;
    }
  }
  shapes.push_back(shape);
  return shapes.size() - 1;
}

float* Lowering::constant(size_t count) {
  shared_.constants.push_back(std::make_unique<float[]>(count));
  return shared_.constants.back().get();
}

std::string Lowering::label(const Node& node) const {
  std::string text;
  for (const ValueId id : node.outputs) {
    text += (text.empty() ? "%" : ", %") + graph().value(id).name;
  }
  return text + " = " + node.op;
}

}  // namespace effinfer::compiler
