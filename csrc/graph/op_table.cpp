// The operators: their inputs, attributes and traits. docs/graph_ops.md is the prose of it.
#include <iterator>

#include "effinfer/ops/elementwise.h"
#include "graph/op_inference.h"
#include "graph/op_specs.h"
#include "ops/limits.h"

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

// The ends of the table, and what only moves rows.
std::vector<OpSpec> row_ops() {
  return {
      {.name = "embedding",
       .min_inputs = 2,
       .max_inputs = 2,
       .attributes = {number("scale", 1.0)},
       .infer = infer_embedding,
       .step_input = StepInput{0, "token_ids"},
       .cheap = true},
      {.name = "select_rows",
       .min_inputs = 2,
       .max_inputs = 2,
       .infer = infer_select_rows,
       .step_input = StepInput{1, "logit_rows"},
       .cheap = true},
  };
}

std::vector<OpSpec> linear_ops() {
  return {
      {.name = "linear",
       .min_inputs = 2,
       .max_inputs = 3,
       .infer = infer_linear,
       .row_wise = true,
       .source_only = true},
      {.name = "ternary_linear",
       .min_inputs = 2,
       .max_inputs = 3,
       .infer = infer_ternary_linear,
       .row_wise = true,
       .source_only = true},
      {.name = "to_act", .infer = infer_to_act, .cheap = true},
      // x, and a weight, a bias and a residual a part.
      {.name = "matmul",
       .min_inputs = 2,
       .max_inputs = 1 + 3 * ops::kMaxMatmulParts,
       .attributes = {integer("parts"), integers("bias"), integers("residual")},
       .infer = infer_matmul,
       .aliases = alias_residuals},
      // x, and a weight and a bias of gate and up.
      {.name = "matmul_glu",
       .min_inputs = 3,
       .max_inputs = 5,
       .attributes = {integer("parts", 2), integers("bias"), integers("residual"),
                      text("activation"), flag("as_operand", false)},
       .infer = infer_matmul_glu},
  };
}

std::vector<OpSpec> norm_ops() {
  return {
      {.name = "rms_norm",
       .min_inputs = 2,
       .max_inputs = 2,
       .attributes = {number("eps"), integer("groups", 1), flag("as_operand", false)},
       .infer = infer_rms_norm,
       .aliases = alias_unless_operand,
       .row_wise = true,
       .cheap = true},
      {.name = "add_rms_norm",
       .min_inputs = 3,
       .max_inputs = 3,
       .attributes = {number("eps"), flag("as_operand", false)},
       .infer = infer_add_rms_norm,
       .aliases = alias_both,
       .cheap = true},
  };
}

// What rotates, and what writes the KV cache.
std::vector<OpSpec> rope_ops() {
  return {
      {.name = "rope_table",
       .max_inputs = 2,
       .attributes = {integer("dims"), number("theta"), text("scaling", "none"),
                      number("factor", 1.0), number("original_max_position", 0.0),
                      number("low_freq_factor", 1.0), number("high_freq_factor", 4.0),
                      number("beta_fast", 32.0), number("beta_slow", 1.0),
                      number("attention_factor", 0.0), integer("period", 0), integer("shift", 0),
                      integer("most", -1), integer("tempered_from", 0)},
       .infer = infer_rope_table,
       .step_input = StepInput{0, "positions"},
       .cheap = true},
      {.name = "rope",
       .min_inputs = 2,
       .max_inputs = 2,
       .attributes = {integer("heads"), integer("head_dim"), flag("interleaved", false)},
       .infer = infer_rope,
       .aliases = alias_first,
       .cheap = true},
      {.name = "kv_append",
       .min_inputs = 2,
       .max_inputs = 2,
       .attributes = {integer("layer"), integer("heads"), integer("head_dim")},
       .infer = infer_kv_append},
      {.name = "rope_append",
       .min_inputs = 3,
       .max_inputs = 6,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
                      flag("rope", false), flag("interleaved", false), flag("q_norm", false),
                      flag("k_norm", false), number("eps", 0.0)},
       .infer = infer_rope_append},
  };
}

// What chooses keys for blocks of prompts.
std::vector<OpSpec> block_index_ops() {
  return {
      {.name = "column_index",
       .min_inputs = 2,
       .max_inputs = 3,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
                      number("sm_scale"), integer("last_rows", 64), integer("row_stride", 0),
                      integer("columns", 0), number("column_mass", 0.0), integer("slashes", 0),
                      number("slash_mass", 0.0), integer("sink_tokens", 0),
                      integer("local_tokens", 0), integer("min_tokens", 0), integers("only")},
       .infer = infer_column_index},
      {.name = "block_index",
       .min_inputs = 2,
       .max_inputs = 3,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
                      number("sm_scale"), integer("stride", 0), text("queries", "mean"),
                      integer("pages", 0), number("mass", 0.0), integer("keys", 0),
                      number("share", 0.0), integer("sink_tokens", 0), integer("local_tokens", 0),
                      integer("min_tokens", 0), integers("only")},
       .infer = infer_block_index},
      {.name = "bucket_index",
       .min_inputs = 2,
       .max_inputs = 3,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
                      number("sm_scale"), integer("bits", 8), integer("keys", 0),
                      integer("samples", 0), integer("seed", 0), integer("sink_tokens", 0),
                      integer("local_tokens", 0), integer("min_tokens", 0), integers("only")},
       .infer = infer_bucket_index},
  };
}

// And for generated rows, or for both.
std::vector<OpSpec> row_index_ops() {
  return {
      {.name = "page_index",
       .min_inputs = 2,
       .max_inputs = 3,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
                      number("sm_scale"), text("score", "bounds"), integer("unit", 64),
                      integer("keys", 0), number("share", 0.0), text("vote", "highest"),
                      integer("sink_tokens", 0), integer("local_tokens", 0),
                      integer("min_tokens", 0), integers("only"), integer("window_left", -1)},
       .infer = infer_page_index},
      {.name = "key_index",
       .min_inputs = 2,
       .max_inputs = 3,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
                      number("sm_scale"), integers("channels"), integer("keys", 0),
                      number("share", 0.0), text("vote", "highest"), integer("sink_tokens", 0),
                      integer("local_tokens", 0), integer("min_tokens", 0), integers("only"),
                      integer("of_layer", -1), number("reuse", 0.0), text("plane", ""),
                      integer("window_left", -1)},
       .infer = infer_key_index},
      {.name = "hash_index",
       .min_inputs = 2,
       .max_inputs = 3,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
                      number("sm_scale"), integer("bits", 8), integer("tables", 40),
                      integer("seed", 0), integers("means"), integer("sink_tokens", 0),
                      integer("local_tokens", 0), integer("min_tokens", 0), integers("only")},
       .infer = infer_hash_index},
      {.name = "history_index",
       .min_inputs = 3,
       .max_inputs = 4,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
                      number("sm_scale"), text("plane"), integer("every", 16), integer("keys", 0),
                      number("share", 0.0), integer("sink_tokens", 0), integer("local_tokens", 0),
                      integer("min_tokens", 0), integers("only")},
       .infer = infer_history_index},
      {.name = "strided_index",
       .min_inputs = 2,
       .max_inputs = 2,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
                      number("sm_scale"), integer("stride"), integer("shift", 0),
                      integer("sink_tokens", 0), integer("local_tokens", 0),
                      integer("min_tokens", 0), integers("only")},
       .infer = infer_strided_index},
      {.name = "copy_index",
       .max_inputs = 2,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads")},
       .infer = infer_copy_index},
  };
}

std::vector<OpSpec> attention_ops() {
  return {
      {.name = "attention_mass",
       .min_inputs = 2,
       .max_inputs = 2,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
                      number("sm_scale"), text("plane"), number("noise", 0.0),
                      text("reduce", "sum"), number("decay", 1.0)},
       .infer = infer_attention_mass},
      {.name = "attention",
       .min_inputs = 2,
       .max_inputs = 5,
       .attributes = {integer("layer"), integer("heads"), integer("kv_heads"), integer("head_dim"),
                      number("sm_scale"), integer("window_left", -1), integer("sink_tokens", 0),
                      number("logits_soft_cap", 0.0), text("weights", ""),
                      integers("first_percent"), integer("chunk", 0), flag("as_operand", false)},
       .infer = infer_attention},
  };
}

OpSpec unary(ops::UnaryOp op) {
  const auto& [name, parameter] = ops::names(op);
  OpSpec spec = {.name = name,
                 .infer = infer_unary,
                 .aliases = alias_first,
                 .row_wise = true,
                 .cheap = true,
                 .gate = ops::is_activation(op)};
  if (!parameter.empty()) spec.attributes = {number(parameter)};
  return spec;
}

OpSpec binary(std::string_view name) {
  return {.name = name,
          .min_inputs = 2,
          .max_inputs = 2,
          .infer = infer_binary,
          .aliases = alias_both,
          .row_wise = true,
          .cheap = true};
}

std::vector<OpSpec> elementwise_ops() {
  std::vector<OpSpec> specs;
  ops::for_unary_ops([&](ops::UnaryOp op) { specs.push_back(unary(op)); });
  for (const std::string_view name : ops::kBinaryOpNames) specs.push_back(binary(name));
  return specs;
}

}  // namespace

const std::vector<OpSpec>& all_ops() {
  static const std::vector<OpSpec> table = [] {
    std::vector<OpSpec> all;
    for (const auto group : {row_ops, linear_ops, norm_ops, rope_ops, block_index_ops,
                             row_index_ops, attention_ops, elementwise_ops}) {
      std::vector<OpSpec> more = group();
      std::move(more.begin(), more.end(), std::back_inserter(all));
    }
    return all;
  }();
  return table;
}

}  // namespace effinfer::graph
