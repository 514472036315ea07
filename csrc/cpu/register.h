// The CPU kernels, one line an operator.
#pragma once

namespace effinfer::cpu {

// Each fills its operator's table; defined in <op>_register.cpp beside the kernels.
void register_operand();
void register_matmul();
void register_attention();
void register_list_attention();
void register_attention_scores();
void register_prefill_index();
void register_rope_append();
void register_elementwise();
void register_merge_states();
void register_row_math();

// All of them.
void register_cpu();

}  // namespace effinfer::cpu
