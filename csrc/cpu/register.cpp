#include "cpu/register.h"

#include <mutex>

#include "ops/merge_states.h"

namespace effinfer {

void cpu::register_cpu() {
  register_operand();
  register_matmul();
  register_attention();
  register_attention_scores();
  register_prefill_index();
  register_rope_append();
  register_elementwise();
  add_levels<ops::MergeStatesProblem>("merge_states");
  register_row_math();
}

void ops::ensure_registered() {
  static std::once_flag once;
  std::call_once(once, cpu::register_cpu);
}

}  // namespace effinfer
