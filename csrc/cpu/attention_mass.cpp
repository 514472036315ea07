// The driver of attention_mass, on the index kernels' sums of columns. A (sequence, KV head) is one
// member's: its row of the plane is written in one order, for any team.
#include "ops/attention_mass.h"

#include <algorithm>

#include "cpu/prefill_index.h"
#include "cpu/register.h"

namespace effinfer::cpu {
namespace {

using ops::AttentionMassProblem;

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
  tile.columns = scored.plane.values + (p.first_head + kv_head) * scored.plane.stride;
  tile.last_position = p.batch.kv_len[scored.sequence] - 1;
  tile.scratch = scratch;
  for (int32_t first = 0; first < group; first += kIndexRows) {
    const int32_t heads = std::min(group - first, kIndexRows);
    tile.num_rows = count * heads;
    for (int32_t i = 0; i < tile.num_rows; ++i) {
      const int32_t back = behind + count - 1 - i / heads;
      const int64_t head = kv_head * group + first + i % heads;
      tile.q[i] = p.q + (end - 1 - back) * p.q_stride + head * p.kv.head_dim;
      tile.positions[i] = tile.last_position - back;
    }
    level.columns(tile);
  }
}

template <Level kLevel>
void run_attention_mass(const AttentionMassProblem& p, Team& team) {
  const auto& level = kernels<kLevel, PrefillIndexKernels>();
  auto* scratch = static_cast<float*>(team.scratch());
  const int32_t group = p.num_qo_heads / p.kv.num_kv_heads;
  const int32_t most = p.by_row ? 1 : std::max(kIndexRows / group, 1);
  team.for_chunks(p.num_scored * p.kv.num_kv_heads, [&](int64_t item) {
    const ScoredRows& scored = p.scored[item / p.kv.num_kv_heads];
    if (scored.name != p.name) return;
    for (int32_t left = scored.rows; left > 0;) {
      const int32_t count = std::min(left, most);
      left -= count;
      add_rows(level, p, scored, item % p.kv.num_kv_heads, left, count, scratch);
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
  return static_cast<size_t>(column_scratch_floats(p.kv.head_dim)) * sizeof(float);
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
