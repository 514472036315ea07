// The attention scores driver: a team shares the problem's items.
#include <algorithm>

#include "cpu/attention_scores.h"
#include "cpu/register.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::AttentionScoresProblem;

void run_item(void (*kernel)(const AttentionScoresTile&), const AttentionScoresProblem& p,
              const ops::ScoreItem& item, uint8_t* scratch) {
  const int32_t group = p.num_qo_heads / p.num_kv_heads;
  const int32_t first_head = item.kv_head * group;
  const int32_t first_row = p.qo_indptr[item.sequence];
  const int32_t first_kv = p.kv_indptr[item.sequence];
  const ops::TokenSpan all = {0, p.kv_len[item.sequence], 0, 0};
  AttentionScoresTile tile = {};
  ListAttentionTile& list = tile.list;
  list.q = p.q;
  list.q.data += (first_row * p.q.row_stride + first_head * p.q.head_stride) *
                 dtype_info(p.q.dtype).block_bytes;
  list.k = p.k;
  list.k.data += item.kv_head * p.k.head_stride;
  if (p.k.scales != nullptr) list.k.scales += item.kv_head * p.k.scale_head_stride;
  list.v.data = list.k.data;  // of no dimensions
  list.v.dtype = list.k.dtype;
  if (p.pages != nullptr) list.pages = p.pages + first_kv;
  list.page_size = p.page_size;
  list.first_token = p.pages != nullptr ? 0 : first_kv;
  list.num_rows = p.qo_indptr[item.sequence + 1] - first_row;
  list.num_heads = group;
  list.spans = &all;
  list.num_spans = 1;
  list.num_tokens = all.end;
  list.first_unit = item.first_unit;
  list.end_unit = item.end_unit;
  list.position = all.end - list.num_rows;
  list.causal = p.causal;
  list.window_left = p.window_left;
  list.sm_scale = p.sm_scale;
  list.soft_cap = p.logits_soft_cap;
  list.scratch = scratch;
  if (p.positions != nullptr) tile.positions = p.positions + first_row;
  tile.lse = p.lse + static_cast<int64_t>(first_row) * p.num_qo_heads + first_head;
  tile.lse_row_stride = p.num_qo_heads;
  tile.maximum = p.maximum;
  tile.row_block = p.row_block;
  tile.key_block = p.key_block;
  const ops::ScoreRows& rows = p.rows[item.sequence];
  tile.out = p.out + rows.first + first_head * rows.head_stride;
  tile.head_stride = rows.head_stride;
  tile.block_stride = rows.block_stride;
  if (p.diagonals != nullptr) tile.diagonals = p.diagonals + item.diagonals;
  kernel(tile);
}

template <void (*const* kKernel)(const AttentionScoresTile&)>
void run(const AttentionScoresProblem& p, Team& team) {
  auto* scratch = static_cast<uint8_t*>(team.scratch());
  team.for_chunks(p.num_items, [&](int64_t i) { run_item(*kKernel, p, p.items[i], scratch); });
}

const char* rejects(const AttentionScoresProblem&) {
  return nullptr;
}

#if EFFINFER_X86
const char* rejects_bf16(const AttentionScoresProblem& p) {
  if (p.q.dtype != DType::bf16) return "needs bf16 queries";
  if (p.k.dtype == DType::f32 || p.k.dtype == DType::f16) return "needs bf16 or 8-bit keys";
  if (!cpu_features().avx512_bf16) return "needs AVX512-BF16";
  return nullptr;
}
#endif

size_t scratch_bytes(const AttentionScoresProblem& p) {
  const int64_t group = p.num_qo_heads / p.num_kv_heads;
  return static_cast<size_t>(attention_scores_scratch(group, round_up_16(p.k.dims)));
}

}  // namespace

void register_attention_scores() {
  auto& table = ops::mutable_table<AttentionScoresProblem>();
  table.add({"attention_scores.portable", Isa::portable, rejects, run<&portable::kAttentionScores>,
             scratch_bytes});
#if EFFINFER_X86
  table.add(
      {"attention_scores.avx2", Isa::avx2, rejects, run<&avx2::kAttentionScores>, scratch_bytes});
  table.add({"attention_scores.avx512", Isa::avx512, rejects, run<&avx512::kAttentionScores>,
             scratch_bytes});
  table.add({"attention_scores.avx512.bf16", Isa::avx512, rejects_bf16,
             run<&avx512bf16::kAttentionScores>, scratch_bytes});
#endif
}

}  // namespace effinfer::cpu
