#include "cpu/register.h"

#include <mutex>

#include "ops/registry.h"

namespace effinfer {

void cpu::register_cpu() {
  register_operand();
  register_matmul();
  register_attention();
  register_list_attention();
  register_attention_scores();
  register_prefill_index();
  register_rope_append();
  register_elementwise();
  register_merge_states();
  register_row_math();
}

void ops::ensure_registered() {
  static std::once_flag once;
  std::call_once(once, cpu::register_cpu);
}

}  // namespace effinfer
