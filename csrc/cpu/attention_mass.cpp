// The driver of attention_mass: rows of prompts on the index kernels' sums of columns, rows one by
// one as attention would make their sums itself, whose bits they have (vectors/kept_weights.h). A
// (sequence, KV head) is one member's: its row of the plane is written in one order, for any team.
#include "ops/attention_mass.h"

#include <algorithm>
#include <cmath>

#include "cpu/attention.h"
#include "cpu/prefill_index.h"
#include "cpu/register.h"

namespace effinfer::cpu {
namespace {

using ops::AttentionMassProblem;

float* numbers_of(const AttentionMassProblem& p, const ScoredRows& scored, int64_t kv_head) {
  return scored.plane.values + (p.first_head + kv_head) * scored.plane.stride;
}

// Adds what `count` rows give, of which the last is `behind` before the sequence's end, and some of
// the KV head's query heads: rows of one tile, which share its keys.
void add_rows(const PrefillIndexKernels& level, const AttentionMassProblem& p,
              const ScoredRows& scored, int64_t kv_head, int32_t behind, int32_t count,
              float* scratch) {
  const auto group = static_cast<int32_t>(p.num_qo_heads / p.kv.num_kv_heads);
  const int32_t end = p.batch.qo_indptr[scored.sequence + 1];
  ColumnTile tile = {};
  tile.keys = index_keys(p.kv, p.batch, scored.sequence, kv_head);
  tile.sm_scale = p.sm_scale;
  if (scored.noise.values != nullptr && p.noise != 0.0f) {
    tile.noise = scored.noise.values + (p.first_head + kv_head) * scored.noise.stride;
    tile.noise_scale = p.noise;
  }
  tile.columns = numbers_of(p, scored, kv_head);
  tile.last_position = p.batch.kv_len[scored.sequence] - 1;
  tile.scratch = scratch;
  for (int32_t first = 0; first < group; first += kIndexRows) {
    const int32_t heads = std::min(group - first, kIndexRows);
    tile.num_rows = count * heads;
    tile.maximum = p.rule.maximum;
    for (int32_t i = 0; i < tile.num_rows; ++i) {
      const int32_t back = behind + count - 1 - i / heads;
      const int64_t head = kv_head * group + first + i % heads;
      tile.q[i] = p.q + (end - 1 - back) * p.q_stride + head * p.kv.head_dim;
      tile.positions[i] = tile.last_position - back;
      tile.factors[i] = std::pow(p.rule.decay, static_cast<float>(back));
    }
    level.columns(tile);
  }
}

// What the numbers are after all rows, but for what these give.
void decay(const AttentionMassProblem& p, const ScoredRows& scored, int64_t kv_head) {
  if (p.rule.decay == 1.0f) return;
  float* numbers = numbers_of(p, scored, kv_head);
  const float factor = std::pow(p.rule.decay, static_cast<float>(scored.rows));
  for (int64_t i = 0; i < p.batch.kv_len[scored.sequence]; ++i) numbers[i] *= factor;
}

// Whether rows are attention without values: noise is no part of that.
bool attends(const AttentionMassProblem& p) {
  return p.by_row && p.noise == 0.0f;
}

// A member's memory for what one row keeps.
ops::KeptWeights own_kept(const AttentionMassProblem& p, float* memory) {
  const int64_t group = p.num_qo_heads / p.kv.num_kv_heads;
  ops::KeptWeights kept;
  kept.pages = ops::KeptWeights::rounded((p.max_kv_len + ops::kPageSize - 1) / ops::kPageSize);
  kept.room = kept.pages * ops::KeptWeights::page_weights(group);
  kept.weights = memory;
  kept.numbers = memory + kept.room;
  return kept;
}
int64_t own_floats(const AttentionMassProblem& p) {
  const ops::KeptWeights kept = own_kept(p, nullptr);
  return kept.room + ops::KeptWeights::row_numbers(p.num_qo_heads / p.kv.num_kv_heads, kept.pages);
}

// Adds what the row gives that is `back` before the sequence's end.
void attend(const AttentionKernels& level, const AttentionMassProblem& p, const ScoredRows& scored,
            int64_t kv_head, int32_t back, float* memory) {
  const int64_t s = scored.sequence;
  const int32_t group = p.num_qo_heads / p.kv.num_kv_heads;
  const int64_t row = p.batch.qo_indptr[s + 1] - 1 - back;
  const float* q = p.q + row * p.q_stride + kv_head * group * p.kv.head_dim;
  AttentionTask task = {};
  task.q = {reinterpret_cast<const uint8_t*>(q), DType::f32, p.kv.head_dim, p.q_stride,
            p.kv.head_dim};
  task.k = ops::keys_of(p.kv);
  task.k.data += kv_head * task.k.head_stride;
  if (task.k.scales != nullptr) task.k.scales += kv_head * task.k.scale_head_stride;
  task.v.data = task.k.data;  // of no dimensions
  task.pages = p.batch.kv_indices + p.batch.kv_indptr[s];
  task.page_size = ops::kPageSize;
  task.num_rows = 1;
  task.num_heads = group;
  task.position = p.batch.kv_len[s] - 1 - back;
  task.num_tokens = task.position + 1;
  task.end_unit = task.position / ops::kPageSize + 1;
  task.causal = true;
  task.window_left = -1;
  task.q_scale = p.sm_scale;
  task.score_scale = 1.0f;
  task.out_dtype = DType::f32;
  task.out = reinterpret_cast<uint8_t*>(memory);  // of no values
  const ops::KeptWeights kept = own_kept(p, memory);
  task.kept = kept.numbers;
  task.kept_weights = kept.weights;
  task.scratch = reinterpret_cast<uint8_t*>(memory + own_floats(p));
  level.pages(task);
  const KeptRow kept_row = {kept.numbers, group, task.end_unit};
  level.end_kept(kept_row);
  level.add_kept(kept_row, p.rule, task.member, kept.weights, numbers_of(p, scored, kv_head));
}

// What attention has kept: each member's own part of all rows.
void add_kept(const AttentionKernels& level, const AttentionMassProblem& p, int32_t member) {
  const int32_t group = p.num_qo_heads / p.kv.num_kv_heads;
  for (int64_t i = 0; i < p.num_scored; ++i) {
    const ScoredRows& scored = p.scored[i];
    if (scored.name != p.name) continue;
    const int32_t pages = (p.batch.kv_len[scored.sequence] + ops::kPageSize - 1) / ops::kPageSize;
    for (int64_t kv_head = 0; kv_head < p.kv.num_kv_heads; ++kv_head) {
      float* numbers = p.kept.numbers + (i * p.kv.num_kv_heads + kv_head) *
                                            ops::KeptWeights::row_numbers(group, p.kept.pages);
      level.add_kept({numbers, group, pages}, p.rule, member, p.kept.weights + member * p.kept.room,
                     numbers_of(p, scored, kv_head));
    }
  }
}

template <Level kLevel>
void run_attention_mass(const AttentionMassProblem& p, Team& team) {
  const auto& columns = kernels<kLevel, PrefillIndexKernels>();
  const auto& attention = kernels<kLevel, AttentionKernels>();
  if (p.kept.is_kept()) return add_kept(attention, p, team.rank());
  auto* scratch = static_cast<float*>(team.scratch());
  const int32_t group = p.num_qo_heads / p.kv.num_kv_heads;
  const int32_t most = p.by_row ? 1 : std::max(kIndexRows / group, 1);
  team.for_chunks(p.num_scored * p.kv.num_kv_heads, [&](int64_t item) {
    const ScoredRows& scored = p.scored[item / p.kv.num_kv_heads];
    if (scored.name != p.name) return;
    const int64_t kv_head = item % p.kv.num_kv_heads;
    if (!attends(p)) decay(p, scored, kv_head);
    for (int32_t left = scored.rows; left > 0;) {
      const int32_t count = std::min(left, most);
      left -= count;
      if (attends(p)) {
        attend(attention, p, scored, kv_head, left, scratch);
      } else {
        add_rows(columns, p, scored, kv_head, left, count, scratch);
      }
    }
  });
}

const char* rejects_shape(const AttentionMassProblem& p) {
  return p.kv.head_dim <= 0 || p.kv.head_dim % 16 != 0 ? "head_dim is not a multiple of 16"
                                                       : nullptr;
}

const char* rejects(const AttentionMassProblem& p) {
  return p.arithmetic == ops::Arithmetic::f32 ? rejects_shape(p) : "multiplies in f32";
}

const char* rejects_bf16(const AttentionMassProblem& p) {
  if (p.arithmetic != ops::Arithmetic::bf16) return "multiplies in bf16";
  if (!cpu_features().avx512_bf16) return "needs AVX512-BF16";
  return p.kv.dtype == DType::bf16 ? rejects_shape(p) : "needs bf16 pages";
}

size_t scratch_bytes(const AttentionMassProblem& p) {
  const int64_t group = p.num_qo_heads / p.kv.num_kv_heads;
  const int64_t attention = own_floats(p) * 4 + attention_scratch_bytes(group, p.kv.head_dim, 0);
  return static_cast<size_t>(std::max(column_scratch_floats(p.kv.head_dim) * 4, attention));
}

}  // namespace

void register_attention_mass() {
  auto& table = ops::mutable_table<AttentionMassProblem>();
  for_levels<Level::portable, Level::avx2, Level::avx512>([&]<Level kLevel>() {
    table.add({"attention_mass." + std::string(name(kLevel)), isa_of(kLevel), rejects,
               run_attention_mass<kLevel>, scratch_bytes});
  });
  for_levels<Level::avx512bf16>([&]<Level kLevel>() {
    table.add({"attention_mass.avx512.bf16", isa_of(kLevel), rejects_bf16,
               run_attention_mass<kLevel>, scratch_bytes});
  });
}

}  // namespace effinfer::cpu
