// The attention driver: a team shares the plan's items. Who finishes a row's last item merges its
// partial results and stores the row, so no barrier is needed in between.
#include <algorithm>
#include <atomic>

#include "cpu/attention.h"
#include "cpu/operand.h"
#include "cpu/register.h"
#include "cpu/rope_append.h"
#include "ops/attention.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::AttentionProblem;

// What an ISA level brings.
struct Level {
  const AttentionKernels& attention;
  const RopeAppendKernel& rope_append;
  ops::StoreOperandBlocks store_blocks;
};

// A member's share of a call; its scratch holds the tile's own needs, then rotated queries and
// output rows of a tile.
class Member {
 public:
  Member(const Level& level, const AttentionProblem& problem, float* scratch)
      : level_(level),
        p_(problem),
        group_(problem.num_qo_heads / problem.kv.num_kv_heads),
        cols_(static_cast<int64_t>(group_) * problem.kv.head_dim),
        scratch_(scratch),
        queries_(scratch + tile_floats(problem)),
        outputs_(queries_ + row_floats(problem)) {}

  void run_item(const ops::AttentionWorkItem& item) {
    AttentionTile tile = make_tile(item);
    if (p_.append.k != nullptr) {
      rope_append_rows(level_.rope_append, p_.append, item.kv_head, item.first_row,
                       item.first_row + item.num_rows, tile.first_page, tile.end_page, queries_,
                       cols_);
      tile.q = queries_;
      tile.q_stride = cols_;
    }
    tile.out = output(item.first_row, item.kv_head);
    tile.out_stride = output_stride();
    if (item.partial >= 0) {
      tile.partial_out = p_.plan.partial_out + item.partial * p_.kv.head_dim;
      tile.partial_ms = p_.plan.partial_ms + static_cast<int64_t>(item.partial) * 2;
    }
    level_.attention.tile(p_.kv.dtype, tile);
    if (item.partial < 0) {
      store(item.first_row, item.num_rows, item.kv_head);
    } else if (is_last(item)) {
      for (int32_t i = 0; i < item.num_rows; ++i) run_merge(p_.plan.merges[item.first_merge + i]);
    }
  }

  // Floats of a tile's scratch, and of one of its two arrays of rows.
  static int64_t tile_floats(const AttentionProblem& p) {
    return (attention_scratch_floats(tile_rows(p), p.kv.head_dim) + 15) / 16 * 16;
  }
  static int64_t row_floats(const AttentionProblem& p) { return tile_rows(p) * p.kv.head_dim; }

 private:
  static int64_t tile_rows(const AttentionProblem& p) {
    return std::max<int64_t>(ops::kAttentionTileRows, p.num_qo_heads / p.kv.num_kv_heads);
  }

  AttentionTile make_tile(const ops::AttentionWorkItem& item) const {
    const int64_t first_col = item.kv_head * cols_;
    const int32_t end_row = p_.batch.qo_indptr[item.sequence + 1];
    AttentionTile tile = {};
    tile.q = p_.q + item.first_row * p_.q_stride + first_col;
    tile.q_stride = p_.q_stride;
    tile.num_tokens = item.num_rows;
    tile.group = group_;
    tile.head_dim = p_.kv.head_dim;
    tile.k = p_.kv.k_head(0, item.kv_head);
    tile.v = p_.kv.v_head(0, item.kv_head);
    tile.page_bytes = static_cast<int64_t>(p_.kv.head_bytes()) * p_.kv.num_kv_heads;
    if (p_.kv.dtype == DType::i8) {
      tile.k_scale = p_.kv.k_scale + item.kv_head * ops::kPageSize;
      tile.v_scale = p_.kv.v_scale + item.kv_head * ops::kPageSize;
      tile.page_scales = p_.kv.num_kv_heads * ops::kPageSize;
    }
    tile.pages = p_.batch.kv_indices + p_.batch.kv_indptr[item.sequence];
    tile.first_page = item.first_page;
    tile.end_page = item.first_page + item.num_pages;
    tile.position = p_.batch.kv_len[item.sequence] - (end_row - item.first_row);
    tile.window_left = p_.window_left;
    tile.sinks = p_.sinks;
    const int32_t first_row = p_.batch.qo_indptr[item.sequence];
    tile.step_start = p_.batch.kv_len[item.sequence] - (end_row - first_row);
    if (p_.batch.ancestors != nullptr) tile.ancestors = p_.batch.ancestors + item.first_row;
    tile.visits = p_.visits.of_rows(p_.batch, item.sequence, item.first_row, item.kv_head);
    tile.sm_scale = p_.sm_scale;
    tile.soft_cap = p_.logits_soft_cap;
    tile.scratch = scratch_;
    return tile;
  }

  // Whether the other partial results of the item's rows are there. Whoever comes last merges, in
  // the order of the keys: the result does not depend on who that is.
  bool is_last(const ops::AttentionWorkItem& item) const {
    std::atomic_ref<int32_t> done(p_.plan.done[item.first_merge]);
    const int32_t count = p_.plan.merges[item.first_merge].num_partials;
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return false;
    done.store(0, std::memory_order_relaxed);
    return true;
  }

  void run_merge(const ops::AttentionMergeItem& item) {
    AttentionMerge merge = {};
    merge.partial_out = p_.plan.partial_out + item.first_partial * p_.kv.head_dim;
    merge.partial_ms = p_.plan.partial_ms + static_cast<int64_t>(item.first_partial) * 2;
    merge.stride = item.stride;
    merge.num_partials = item.num_partials;
    merge.group = group_;
    merge.head_dim = p_.kv.head_dim;
    merge.out = output(item.row, item.kv_head);
    merge.scratch = scratch_;
    level_.attention.merge(merge);
    store(item.row, 1, item.kv_head);
  }

  // Where rows from `row` on go: to the caller, or to scratch on their way to an operand.
  float* output(int64_t row, int64_t head) const {
    return p_.out_operand.data != nullptr ? outputs_ : p_.out + row * p_.out_stride + head * cols_;
  }
  int64_t output_stride() const { return p_.out_operand.data != nullptr ? cols_ : p_.out_stride; }

  void store(int64_t first, int64_t count, int64_t head) const {
    if (p_.out_operand.data == nullptr) return;
    const int64_t blocks = cols_ / ops::kOperandBlock;
    for (int64_t i = 0; i < count; ++i) {
      level_.store_blocks(p_.out_operand, first + i, head * blocks, blocks, outputs_ + i * cols_);
    }
  }

  const Level& level_;
  const AttentionProblem& p_;
  const int32_t group_;
  const int64_t cols_;  // of a KV head's group
  float* scratch_;
  float* queries_;
  float* outputs_;
};

void run(const Level& level, const AttentionProblem& p, Team& team) {
  Member member(level, p, static_cast<float*>(team.scratch()));
  team.for_chunks(p.plan.num_items, [&](int64_t i) { member.run_item(p.plan.items[i]); });
}

// Whatever the arithmetic.
const char* rejects_shape(const AttentionProblem& p) {
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
  if (p.visits.list_words > 0 && p.window_left >= 0) return "visits know no window";
  const int64_t group_cols =
      static_cast<int64_t>(p.num_qo_heads / p.kv.num_kv_heads) * p.kv.head_dim;
  if (p.out_operand.data != nullptr && group_cols % ops::kOperandBlock != 0) {
    return "the columns of a KV head's group are no whole blocks of the operand";
  }
  return nullptr;
}

const char* rejects(const AttentionProblem& p) {
  if (p.arithmetic != ops::Arithmetic::f32) return "multiplies in f32";
  return rejects_shape(p);
}

#if EFFINFER_X86
const char* rejects_bf16(const AttentionProblem& p) {
  if (p.arithmetic != ops::Arithmetic::bf16) return "multiplies in bf16";
  if (!cpu_features().avx512_bf16) return "needs AVX512-BF16";
  if (p.kv.dtype != DType::bf16) return "needs bf16 pages";
  return rejects_shape(p);
}
#endif

#if EFFINFER_AMX
const char* rejects_amx(const AttentionProblem& p) {
  if (p.kv.head_dim % 32 != 0) return "head_dim is not a multiple of 32";
  return rejects_bf16(p);
}
#endif

size_t scratch_bytes(const AttentionProblem& p) {
  return static_cast<size_t>(Member::tile_floats(p) + 2 * Member::row_floats(p)) * sizeof(float);
}

}  // namespace

void register_attention() {
  auto& table = ops::mutable_table<AttentionProblem>();
  table.add({"attention.portable", Isa::portable, rejects,
             [](const AttentionProblem& p, Team& team) {
               run({portable::kAttention, kernels<cpu::Level::portable, RopeAppendKernel>(),
                    kernels<cpu::Level::portable, OperandKernels>().store_blocks},
                   p, team);
             },
             scratch_bytes});
#if EFFINFER_X86
  table.add({"attention.avx2", Isa::avx2, rejects,
             [](const AttentionProblem& p, Team& team) {
               run({avx2::kAttention, kernels<cpu::Level::avx2, RopeAppendKernel>(),
                    kernels<cpu::Level::avx2, OperandKernels>().store_blocks},
                   p, team);
             },
             scratch_bytes});
  table.add({"attention.avx512", Isa::avx512, rejects,
             [](const AttentionProblem& p, Team& team) {
               run({avx512::kAttention, kernels<cpu::Level::avx512, RopeAppendKernel>(),
                    kernels<cpu::Level::avx512, OperandKernels>().store_blocks},
                   p, team);
             },
             scratch_bytes});
  table.add({"attention.avx512.bf16", Isa::avx512, rejects_bf16,
             [](const AttentionProblem& p, Team& team) {
               run({avx512bf16::kAttention, kernels<cpu::Level::avx512, RopeAppendKernel>(),
                    kernels<cpu::Level::avx512, OperandKernels>().store_blocks},
                   p, team);
             },
             scratch_bytes});
#endif
#if EFFINFER_AMX
  table.add({"attention.amx.bf16", Isa::amx, rejects_amx,
             [](const AttentionProblem& p, Team& team) {
               run({amx::kAttention, kernels<cpu::Level::avx512, RopeAppendKernel>(),
                    kernels<cpu::Level::avx512, OperandKernels>().store_blocks},
                   p, team);
             },
             scratch_bytes});
#endif
}

}  // namespace effinfer::cpu
