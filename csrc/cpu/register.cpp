#include "cpu/register.h"

#include <mutex>

#include "ops/activation.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/merge_states.h"
#include "ops/norm.h"
#include "ops/operand.h"
#include "ops/rope.h"

namespace effinfer {

void cpu::register_cpu() {
  add_levels<ops::UnaryProblem>("unary");
  add_levels<ops::BinaryProblem>("binary");
  add_levels<ops::GatedProblem>("gated");
  add_levels<ops::RmsNormProblem>("rms_norm");
  add_levels<ops::LayerNormProblem>("layer_norm");
  add_levels<ops::EmbeddingProblem, Level::portable>("embedding");
  add_levels<ops::SelectRowsProblem, Level::portable>("select_rows");
  add_levels<ops::RopeTableProblem, Level::portable>("rope_table");
  add_levels<ops::RopeProblem>("rope");
  add_levels<ops::ToOperandProblem>("to_operand");
  register_matmul();
  register_attention();
  register_attention_scores();
  register_prefill_index();
  register_rope_append();
  add_levels<ops::MergeStatesProblem>("merge_states");
  register_row_sampling();
}

void ops::ensure_registered() {
  static std::once_flag once;
  std::call_once(once, cpu::register_cpu);
}

}  // namespace effinfer
