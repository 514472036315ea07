// The attention scores driver: a team shares the problem's items.
#include "cpu/attention_scores.h"

#include <algorithm>

#include "cpu/level.h"
#include "cpu/register.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::AttentionScoresProblem;

void run_item(const ScoresKernels& level, const AttentionScoresProblem& p,
              const ops::ScoreItem& item, uint8_t* scratch) {
  const ops::BatchLayout& batch = p.batch;
  const int32_t group = p.num_qo_heads / p.num_kv_heads;
  const int32_t first_head = item.kv_head * group;
  const int32_t first_row = batch.qo_indptr[item.sequence];
  const int32_t first_kv = batch.kv_indptr[item.sequence];
  ScoresTask task = {};
  AttentionTask& keys = task.keys;
  keys.q = p.q;
  keys.q.data += (first_row * p.q.row_stride + first_head * p.q.head_stride) *
                 dtype_info(p.q.dtype).block_bytes;
  keys.k = p.k;
  keys.k.data += item.kv_head * p.k.head_stride;
  if (p.k.scales != nullptr) keys.k.scales += item.kv_head * p.k.scale_head_stride;
  keys.v.data = keys.k.data;  // of no dimensions
  keys.v.dtype = keys.k.dtype;
  if (batch.kv_indices != nullptr) keys.pages = batch.kv_indices + first_kv;
  keys.page_size = p.page_size;
  keys.first_token = batch.kv_indices != nullptr ? 0 : first_kv;
  keys.num_rows = batch.qo_indptr[item.sequence + 1] - first_row;
  keys.num_heads = group;
  keys.num_tokens = batch.kv_len[item.sequence];
  keys.first_unit = item.first_unit;
  keys.end_unit = item.end_unit;
  keys.position = keys.num_tokens - keys.num_rows;
  keys.causal = p.causal;
  keys.window_left = p.window_left;
  keys.q_scale = p.q.dtype == DType::f32 ? p.sm_scale : 1.0f;
  keys.score_scale = p.q.dtype == DType::f32 ? 1.0f : p.sm_scale;
  keys.soft_cap = p.logits_soft_cap;
  keys.scratch = scratch;
  if (p.positions != nullptr) task.positions = p.positions + first_row;
  task.lse = p.lse + static_cast<int64_t>(first_row) * p.num_qo_heads + first_head;
  task.lse_row_stride = p.num_qo_heads;
  task.maximum = p.maximum;
  task.row_block = p.row_block;
  task.key_block = p.key_block;
  const ops::ScoreRows& rows = p.rows[item.sequence];
  task.out = p.out + rows.first + first_head * rows.head_stride;
  task.head_stride = rows.head_stride;
  task.block_stride = rows.block_stride;
  if (p.diagonals != nullptr) task.diagonals = p.diagonals + item.diagonals;
  (p.source == ops::KeySource::pages ? level.pages : level.rows)(task);
}

template <Level kLevel>
void run_scores(const AttentionScoresProblem& p, Team& team) {
  auto* scratch = static_cast<uint8_t*>(team.scratch());
  const auto& level = kernels<kLevel, ScoresKernels>();
  team.for_chunks(p.num_items, [&](int64_t i) { run_item(level, p, p.items[i], scratch); });
}

const char* rejects(const AttentionScoresProblem& p) {
  return p.arithmetic == ops::Arithmetic::f32 ? nullptr : "multiplies in f32";
}

const char* rejects_bf16(const AttentionScoresProblem& p) {
  if (p.arithmetic != ops::Arithmetic::bf16) return "multiplies in bf16";
  return cpu_features().avx512_bf16 ? nullptr : "needs AVX512-BF16";
}

size_t scratch_bytes(const AttentionScoresProblem& p) {
  const int64_t group = p.num_qo_heads / p.num_kv_heads;
  return static_cast<size_t>(attention_scores_scratch(group, round_up_16(p.k.dims)));
}

}  // namespace

void register_attention_scores() {
  auto& table = ops::mutable_table<AttentionScoresProblem>();
  for_levels<Level::portable, Level::avx2, Level::avx512>([&]<Level kLevel>() {
    table.add({"attention_scores." + std::string(name(kLevel)), isa_of(kLevel), rejects,
               run_scores<kLevel>, scratch_bytes});
  });
  for_levels<Level::avx512bf16>([&]<Level kLevel>() {
    table.add({"attention_scores.avx512.bf16", isa_of(kLevel), rejects_bf16, run_scores<kLevel>,
               scratch_bytes});
  });
}

}  // namespace effinfer::cpu
