// The shape inference and in-place functions that op_specs.cpp lists.
#pragma once

#include <vector>

#include "graph/op_specs.h"

namespace effinfer::graph {

std::vector<ValueType> infer_embedding(const OpContext& context);
std::vector<ValueType> infer_rms_norm(const OpContext& context);
std::vector<ValueType> infer_linear(const OpContext& context);
std::vector<ValueType> infer_ternary_linear(const OpContext& context);
std::vector<ValueType> infer_rope_table(const OpContext& context);
std::vector<ValueType> infer_rope(const OpContext& context);
std::vector<ValueType> infer_kv_append(const OpContext& context);
std::vector<ValueType> infer_column_index(const OpContext& context);
std::vector<ValueType> infer_block_index(const OpContext& context);
std::vector<ValueType> infer_bucket_index(const OpContext& context);
std::vector<ValueType> infer_page_index(const OpContext& context);
std::vector<ValueType> infer_key_index(const OpContext& context);
std::vector<ValueType> infer_hash_index(const OpContext& context);
std::vector<ValueType> infer_strided_index(const OpContext& context);
std::vector<ValueType> infer_history_index(const OpContext& context);
std::vector<ValueType> infer_copy_index(const OpContext& context);
std::vector<ValueType> infer_attention_mass(const OpContext& context);
std::vector<ValueType> infer_attention(const OpContext& context);
std::vector<ValueType> infer_unary(const OpContext& context);
std::vector<ValueType> infer_binary(const OpContext& context);
std::vector<ValueType> infer_select_rows(const OpContext& context);
std::vector<ValueType> infer_to_act(const OpContext& context);
std::vector<ValueType> infer_matmul(const OpContext& context);
std::vector<ValueType> infer_matmul_glu(const OpContext& context);
std::vector<ValueType> infer_add_rms_norm(const OpContext& context);
std::vector<ValueType> infer_rope_append(const OpContext& context);

std::vector<Alias> alias_first(const Node& node);           // output 0 over input 0
std::vector<Alias> alias_both(const Node& node);            // output 0 over input 0 or 1
std::vector<Alias> alias_unless_operand(const Node& node);  // alias_first when floats are written
std::vector<Alias> alias_residuals(const Node& node);       // each part over its residual

}  // namespace effinfer::graph
