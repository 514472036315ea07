#include "cuda/register.h"

namespace effinfer::cuda {

void register_cuda() {
  register_elementwise();
  register_rows();
  register_embedding();
  register_operand();
  register_rope();
  register_matmul();
  register_attention();
  register_plain_attention();
  register_latent_attention();
  register_key_scores();
  register_move_tokens();
  register_append_pages();
  register_top_rows();
  register_sample();
  register_row_top();
  register_top_windows();
  register_prefill_index();
  register_column_index();
  register_page_index();
  register_strided_index();
  register_hash_index();
  register_bucket_index();
  register_history_index();
  register_caller_index();
}

}  // namespace effinfer::cuda
