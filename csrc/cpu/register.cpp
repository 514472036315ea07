#include "cpu/register.h"

#include <mutex>

#include "core/backend.h"
#include "ops/activation.h"
#include "ops/convert_rows.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/encode_pages.h"
#include "ops/merge_states.h"
#include "ops/norm.h"
#include "ops/operand.h"
#include "ops/packbits.h"
#include "ops/page.h"
#include "ops/page_bounds.h"
#include "ops/pooled_rows.h"
#include "ops/rope.h"
#include "ops/score_passes.h"
#include "ops/score_pooling.h"
#include "ops/strided_index.h"
#include "ops/token_lists.h"

namespace effinfer {

void cpu::register_cpu() {
  add_levels<ops::UnaryProblem>("unary");
  add_levels<ops::BinaryProblem>("binary");
  add_levels<ops::GatedProblem>("gated");
  add_levels<ops::RmsNormProblem>("rms_norm");
  add_levels<ops::LayerNormProblem>("layer_norm");
  add_levels<ops::ConvertRowsProblem>("convert_rows");
  add_levels<ops::EmbeddingProblem, Level::portable>("embedding");
  add_levels<ops::SelectRowsProblem, Level::portable>("select_rows");
  add_levels<ops::RopeTableProblem, Level::portable>("rope_table");
  add_levels<ops::RopeProblem>("rope");
  add_levels<ops::ToOperandProblem>("to_operand");
  register_matmul();
  register_attention();
  register_attention_scores();
  register_prefill_index();
  register_page_index();
  register_hash_index();
  register_bucket_index();
  register_history_index();
  add_levels<ops::StridedIndexProblem, Level::portable>("strided_index");
  register_attention_mass();
  register_rope_append();
  add_levels<ops::MergeStatesProblem>("merge_states");
  register_row_sampling();
  add_levels<ops::AppendPagesProblem, Level::portable>("append_pages");
  add_levels<ops::EncodePagesProblem>("encode_pages");
  add_levels<ops::PackBitsProblem, Level::portable>("packbits");
  add_levels<ops::PageBoundsProblem, Level::portable>("page_bounds");
  add_levels<ops::PageScoresProblem, Level::portable>("page_scores");
  add_levels<ops::PoolRowsProblem, Level::portable>("pool_rows");
  add_levels<ops::PoolScoresProblem, Level::portable>("pool_scores");
  add_levels<ops::FoldDiagonalsProblem, Level::portable>("fold_diagonals");
  add_levels<ops::PositionMaskProblem, Level::portable>("position_mask");
  add_levels<ops::ColumnListsProblem, Level::portable>("column_lists");
  add_levels<ops::BlockListsProblem, Level::portable>("block_lists");
  add_levels<ops::PageListsProblem, Level::portable>("page_lists");
}

void ops::ensure_registered() {
  static std::once_flag once;
  std::call_once(once, [] {
    cpu_features();  // asks for tiles: whoever has a table may run a variant that uses them
    cpu::register_cpu();
    if (const Backend* cuda = cuda_backend()) cuda->register_kernels();
  });
}

}  // namespace effinfer
