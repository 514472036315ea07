// The attention driver: a team shares the plan's items, then the merges; the operand is stored by
// who finishes the output, or in a last round when heads share its blocks.
#include <algorithm>

#include "cpu/attention.h"
#include "cpu/register.h"
#include "kernels/attention.h"
#include "kernels/registry.h"

namespace effinfer::cpu {
namespace {

using kernels::AttentionProblem;

void run_item(const AttentionKernels& level, const AttentionProblem& p,
              const kernels::AttentionWorkItem& item, float* scratch) {
  const int32_t group = p.num_qo_heads / p.kv.num_kv_heads;
  const int64_t head = static_cast<int64_t>(item.kv_head) * group;
  const int64_t dim = p.kv.head_dim;
  const int32_t end_row = p.batch.qo_indptr[item.sequence + 1];
  AttentionTile tile = {};
  tile.q = p.q + item.first_row * p.q_stride + head * dim;
  tile.q_stride = p.q_stride;
  tile.num_tokens = item.num_rows;
  tile.group = group;
  tile.head_dim = p.kv.head_dim;
  tile.k = p.kv.k_head(0, item.kv_head);
  tile.v = p.kv.v_head(0, item.kv_head);
  tile.page_bytes = static_cast<int64_t>(p.kv.head_bytes()) * p.kv.num_kv_heads;
  if (p.kv.dtype == DType::i8) {
    tile.k_scale = p.kv.k_scale + item.kv_head * kernels::kPageSize;
    tile.v_scale = p.kv.v_scale + item.kv_head * kernels::kPageSize;
    tile.page_scales = p.kv.num_kv_heads * kernels::kPageSize;
  }
  tile.pages = p.batch.kv_indices + p.batch.kv_indptr[item.sequence];
  tile.first_page = item.first_page;
  tile.end_page = item.first_page + item.num_pages;
  tile.position = p.batch.kv_len[item.sequence] - (end_row - item.first_row);
  tile.window_left = p.window_left;
  tile.sm_scale = p.sm_scale;
  tile.soft_cap = p.logits_soft_cap;
  tile.out = p.out + item.first_row * p.out_stride + head * dim;
  tile.out_stride = p.out_stride;
  if (item.partial >= 0) {
    tile.partial_out = p.plan.partial_out + item.partial * dim;
    tile.partial_ms = p.plan.partial_ms + static_cast<int64_t>(item.partial) * 2;
  }
  tile.scratch = scratch;
  level.tile(p.kv.dtype, tile);
}

void run_merge(const AttentionKernels& level, const AttentionProblem& p,
               const kernels::AttentionMergeItem& item, float* scratch) {
  const int32_t group = p.num_qo_heads / p.kv.num_kv_heads;
  const int64_t dim = p.kv.head_dim;
  AttentionMerge merge = {};
  merge.partial_out = p.plan.partial_out + item.first_partial * dim;
  merge.partial_ms = p.plan.partial_ms + static_cast<int64_t>(item.first_partial) * 2;
  merge.stride = item.stride;
  merge.num_partials = item.num_partials;
  merge.group = group;
  merge.head_dim = p.kv.head_dim;
  merge.out = p.out + item.row * p.out_stride + static_cast<int64_t>(item.kv_head) * group * dim;
  merge.scratch = scratch;
  level.merge(merge);
}

// The output of a KV head's group is whole blocks of the operand when their sizes divide.
bool stores_blocks(const AttentionProblem& p) {
  const int64_t cols = static_cast<int64_t>(p.num_qo_heads / p.kv.num_kv_heads) * p.kv.head_dim;
  return p.out_act.data != nullptr && cols % kernels::kActivationBlock == 0;
}

// The finished output of one KV head in rows [first, first + count) as operand blocks.
void store_blocks(kernels::StoreActivationBlocks store, const AttentionProblem& p, int64_t head,
                  int64_t first, int64_t count) {
  const int64_t cols = static_cast<int64_t>(p.num_qo_heads / p.kv.num_kv_heads) * p.kv.head_dim;
  const int64_t blocks = cols / kernels::kActivationBlock;
  for (int64_t row = first; row < first + count; ++row) {
    store(p.out_act, row, head * blocks, blocks, p.out + row * p.out_stride + head * cols);
  }
}

void run(const AttentionKernels& level, Isa isa, const AttentionProblem& p, Team& team) {
  float* scratch = static_cast<float*>(team.scratch());
  const bool blocks = stores_blocks(p);
  const kernels::StoreActivationBlocks store = kernels::store_activation_blocks(isa);
  team.for_chunks(p.plan.num_items, [&](int64_t i) {
    const kernels::AttentionWorkItem& item = p.plan.items[i];
    run_item(level, p, item, scratch);
    if (blocks && item.partial < 0) {
      store_blocks(store, p, item.kv_head, item.first_row, item.num_rows);
    }
  });
  if (p.plan.num_merges > 0) {
    team.barrier();
    team.for_chunks(p.plan.num_merges, [&](int64_t i) {
      const kernels::AttentionMergeItem& merge = p.plan.merges[i];
      run_merge(level, p, merge, scratch);
      if (blocks) store_blocks(store, p, merge.kv_head, merge.row, 1);
    });
  }
  if (p.out_act.data != nullptr && !blocks) {
    team.barrier();
    const kernels::StoreActivationRow store_row = kernels::store_activation_row(isa);
    team.for_chunks(p.batch.num_tokens,
                    [&](int64_t row) { store_row(p.out_act, row, p.out + row * p.out_stride); });
  }
}

const char* rejects(const AttentionProblem& p) {
  const DType dtype = p.kv.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::i8) {
    return "kv_dtype is not f32, f16, bf16 or i8";
  }
  if (p.kv.head_dim <= 0 || p.kv.head_dim > 256 || p.kv.head_dim % 16 != 0) {
    return "head_dim is not a multiple of 16 up to 256";
  }
  if (p.kv.num_kv_heads <= 0 || p.num_qo_heads <= 0 || p.num_qo_heads % p.kv.num_kv_heads != 0) {
    return "heads is not a multiple of kv_heads";
  }
  return nullptr;
}

size_t scratch_bytes(const AttentionProblem& p) {
  const int64_t group = p.num_qo_heads / p.kv.num_kv_heads;
  const int64_t rows = std::max(kernels::kAttentionTileRows, group);
  return static_cast<size_t>(attention_scratch_floats(rows, p.kv.head_dim)) * sizeof(float);
}

}  // namespace

void register_attention() {
  auto& table = kernels::mutable_table<AttentionProblem>();
  table.add({"attention.portable", Isa::portable, rejects,
             [](const AttentionProblem& p, Team& team) {
               run(portable::kAttention, Isa::portable, p, team);
             },
             scratch_bytes});
#if EFFINFER_X86
  table.add(
      {"attention.avx2", Isa::avx2, rejects,
       [](const AttentionProblem& p, Team& team) { run(avx2::kAttention, Isa::avx2, p, team); },
       scratch_bytes});
  table.add(
      {"attention.avx512", Isa::avx512, rejects,
       [](const AttentionProblem& p, Team& team) { run(avx512::kAttention, Isa::avx512, p, team); },
       scratch_bytes});
#endif
}

}  // namespace effinfer::cpu
