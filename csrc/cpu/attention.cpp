// The attention driver: a team shares the work's items. Who finishes a tile's last item merges its
// partial results and stores its rows, so no barrier is needed in between.
#include "cpu/attention.h"

#include <algorithm>
#include <atomic>

#include "cpu/level.h"
#include "cpu/operand.h"
#include "cpu/register.h"
#include "cpu/rope_append.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::AttentionItem;
using ops::AttentionProblem;
using ops::AttentionTile;
using ops::KeySource;

// What an ISA level brings.
struct Kernels {
  const AttentionKernels& attention;
  const RopeAppendKernel& rope_append;
  const OperandKernels& operand;
};

ops::QueryRows at(ops::QueryRows q, const AttentionTile& tile) {
  if (q.dims == 0) return q;
  const int64_t element = tile.first_row * q.row_stride + tile.first_head * q.head_stride;
  q.data += element * dtype_info(q.dtype).block_bytes;
  return q;
}

ops::KvRows at(ops::KvRows rows, int64_t head) {
  if (rows.dims == 0) return rows;
  rows.data += head * rows.head_stride;
  if (rows.scales != nullptr) rows.scales += head * rows.scale_head_stride;
  return rows;
}

int64_t dim_qk(const AttentionProblem& p) {
  return round_up_16(p.k.dims + p.k_rope.dims);
}
int64_t dim_vo(const AttentionProblem& p) {
  return round_up_16(p.v.dims);
}

// Rows of the largest tile; without work that of any.
int64_t most_rows(const AttentionProblem& p) {
  if (p.work.tile_rows > 0) return p.work.tile_rows;
  return ops::most_tile_rows(p.source, p.num_qo_heads / p.num_kv_heads, p.visits.list_words > 0);
}

// A member's share of a call; its scratch holds a task's own needs, then rotated queries and output
// rows of a tile on their way to an operand.
class Member {
 public:
  Member(const Kernels& kernels, const AttentionProblem& problem, Team& team)
      : kernels_(kernels),
        p_(problem),
        team_(team),
        count_(problem.work.num_items),
        cols_(static_cast<int64_t>(problem.num_qo_heads / problem.num_kv_heads) * problem.v.dims),
        scratch_(static_cast<uint8_t*>(team.scratch())),
        queries_(reinterpret_cast<float*>(scratch_ + task_bytes(problem))),
        outputs_(queries_ + most_rows(problem) * problem.v.dims) {}

  void run() {
    for (claim(); next_ < count_;) {
      const int64_t claimed = next_;
      const AttentionItem& item = item_at(claimed);
      const AttentionTile& tile = tile_of(item);
      AttentionTask task = next_task_;
      if (p_.source == KeySource::pages) {
        if (p_.append.k != nullptr) append(tile, task);
        kernels_.attention.pages(task);
      } else {
        task.context = this;
        task.following = [](void* member) { return static_cast<Member*>(member)->claim(); };
        kernels_.attention.rows(task);
      }
      finish(item, tile, task);
      if (next_ == claimed) claim();
    }
  }

  static size_t scratch_bytes(const AttentionProblem& p) {
    const int64_t rows = p.source == KeySource::pages ? 2 * most_rows(p) * p.v.dims : 0;
    return static_cast<size_t>(task_bytes(p) + rows * 4);
  }

 private:
  static int64_t task_bytes(const AttentionProblem& p) {
    return (attention_scratch_bytes(most_rows(p), dim_qk(p), dim_vo(p)) + 63) / 64 * 64;
  }
  const AttentionItem& item_at(int64_t index) const { return p_.work.items[index]; }
  const AttentionTile& tile_of(const AttentionItem& item) const { return p_.work.tiles[item.tile]; }

  // Over rows a member claims when the item at hand is nearly done, so that it fetches the next
  // one's keys and yet nobody waits beside claimed items.
  const AttentionTask* claim() {
    next_ = team_.claim();
    if (next_ >= count_) return nullptr;
    next_task_ = make_task(item_at(next_));
    return &next_task_;
  }

  AttentionTask make_task(const AttentionItem& item) {
    const AttentionTile& tile = tile_of(item);
    const ops::BatchLayout& batch = p_.batch;
    AttentionTask task = {};
    task.q = at(p_.q, tile);
    task.q_rope = at(p_.q_rope, tile);
    task.k = at(p_.k, tile.kv_head);
    task.k_rope = at(p_.k_rope, tile.kv_head);
    task.v = at(p_.v, tile.kv_head);
    task.coded = p_.coded;
    task.kv_head = tile.kv_head;
    if (p_.coded.bits != 0 && p_.coded.features == nullptr) {
      task.coded.data += static_cast<size_t>(tile.kv_head) * p_.coded.head_bytes();
    }
    const int32_t first_kv = batch.kv_indptr[tile.sequence];
    if (batch.kv_indices != nullptr) task.pages = batch.kv_indices + first_kv;
    task.page_size = p_.page_size;
    task.first_token = batch.kv_indices != nullptr ? 0 : first_kv;
    task.num_rows = tile.num_rows;
    task.num_heads = tile.num_heads;
    if (tile.first_span >= 0) task.spans = p_.work.spans + tile.first_span;
    task.num_spans = tile.num_spans;
    task.words = p_.visits.of_rows(batch, tile.sequence, tile.first_row, tile.kv_head);
    task.log_weights =
        p_.visits.weights_of_rows(batch, tile.sequence, tile.first_row, tile.kv_head);
    task.num_tokens = tile.num_tokens;
    task.first_unit = item.first_unit;
    task.end_unit = item.end_unit;
    task.sink_units = tile.sink_units;
    task.first_seen = tile.first_unit;
    task.position =
        batch.step_begin(tile.sequence) + tile.first_row - batch.qo_indptr[tile.sequence];
    if (p_.chunk > 0 && !batch.is_unchunked(tile.sequence)) {
      task.q_before = at(p_.q_before, tile);
      task.q_far = at(p_.q_far, tile);
      task.chunk = p_.chunk / ops::kChunkTokens;
      task.own_chunk = task.position / p_.chunk;
    }
    if (batch.is_tree(tile.sequence)) {
      task.ancestors = batch.ancestors + tile.first_row;
      task.tree_start = batch.tree_begin(tile.sequence);
    }
    set_scores(tile, task);
    set_results(item, tile, task);
    if (const ScoredRows* scored = scored_of(tile)) {
      const int64_t row = (scored - p_.scored) * p_.num_kv_heads + tile.kv_head;
      task.kept =
          p_.kept.numbers + row * ops::KeptWeights::row_numbers(tile.num_heads, p_.kept.pages);
      task.member = team_.rank();
      task.kept_place = kept_place_;
      task.kept_weights = p_.kept.weights + task.member * p_.kept.room + kept_place_;
      kept_place_ +=
          (task.end_unit - task.first_unit) * ops::KeptWeights::page_weights(tile.num_heads);
    }
    task.scratch = scratch_;
    return task;
  }

  // A query of float32 takes the scale itself; a narrower one would round once more, so that its
  // scores do.
  void set_scores(const AttentionTile& tile, AttentionTask& task) const {
    const bool on_queries = p_.q.dtype == DType::f32;
    task.q_scale = on_queries ? p_.sm_scale : 1.0f;
    task.score_scale = on_queries ? 1.0f : p_.sm_scale;
    task.soft_cap = p_.logits_soft_cap;
    task.v_scale = p_.v_scale;
    task.causal = p_.causal;
    task.window_left = p_.window_left;
    task.sink_tokens = p_.sink_tokens;
    task.mask = p_.mask;
    task.mask_bytes = p_.mask_bytes;
    if (p_.mask_starts != nullptr) task.mask_start = p_.mask_starts[tile.sequence];
    if (p_.mask != nullptr) task.mask_row_stride = p_.mask_row_strides[tile.sequence];
    task.list_row = tile.list_row;
    if (p_.alibi_slopes != nullptr) task.alibi_slopes = p_.alibi_slopes + tile.first_head;
    if (p_.sink_logits != nullptr) task.sink_logits = p_.sink_logits + tile.first_head;
    const float* const weights = p_.plane_weights(tile.sequence, tile.kv_head);
    if (weights == nullptr) return;
    task.log_weights = weights;
    if (p_.first_logits != nullptr) task.first_logits = p_.first_logits + tile.first_head;
  }

  void set_results(const AttentionItem& item, const AttentionTile& tile,
                   AttentionTask& task) const {
    if (p_.out_operand.data != nullptr) {
      task.out_dtype = DType::f32;
      task.out = reinterpret_cast<uint8_t*>(outputs_);
      task.out_row_stride = cols_;
    } else {
      task.out_dtype = p_.q.dtype;
      task.out_row_stride = p_.out_stride;
      const int64_t place =
          tile.first_row * p_.out_stride + static_cast<int64_t>(tile.first_head) * p_.v.dims;
      task.out = p_.out + place * dtype_info(p_.q.dtype).block_bytes;
    }
    task.lse_row_stride = p_.num_qo_heads;
    if (p_.lse != nullptr) {
      task.lse = p_.lse + static_cast<int64_t>(tile.first_row) * p_.num_qo_heads + tile.first_head;
    }
    task.lse_factor = p_.lse_factor;
    if (item.partial < 0) return;
    task.partial_out = p_.partial_out + item.partial * dim_vo(p_);
    task.partial_ms = p_.partial_ms + static_cast<int64_t>(item.partial) * 2;
  }

  // The tile's rows normed and rotated, and those of their keys that the item's pages hold.
  void append(const AttentionTile& tile, AttentionTask& task) const {
    const RopeAppendRows rows = {.head = tile.kv_head,
                                 .first = tile.first_row,
                                 .last = tile.first_row + tile.num_rows,
                                 .sequence = tile.sequence,
                                 .first_page = task.first_unit,
                                 .end_page = task.end_unit,
                                 .q_out = queries_,
                                 .q_out_stride = cols_};
    kernels_.rope_append.append(p_.append, rows);
    task.q.data = reinterpret_cast<const uint8_t*>(queries_);
    task.q.row_stride = cols_;
  }

  // Whoever comes last of a tile's items merges, in the order of the keys: the result does not
  // depend on who that is.
  void finish(const AttentionItem& item, const AttentionTile& tile, const AttentionTask& task) {
    if (item.merge >= 0) {
      const ops::AttentionMerge& merge = p_.work.merges[item.merge];
      std::atomic_ref<int32_t> done(p_.done[item.merge]);
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < merge.num_items) return;
      done.store(0, std::memory_order_relaxed);
      kernels_.attention.fold(task, {p_.partial_out + merge.first_partial * dim_vo(p_),
                                     p_.partial_ms + static_cast<int64_t>(merge.first_partial) * 2,
                                     merge.num_partials});
    }
    if (p_.out_operand.data != nullptr) store_operand(tile);
    if (task.kept == nullptr) return;
    const auto pages = static_cast<int32_t>(task.position / ops::kPageSize + 1);
    kernels_.attention.end_kept({task.kept, tile.num_heads, pages});
  }

  void store_operand(const AttentionTile& tile) const {
    const int64_t blocks = cols_ / ops::kOperandBlock;
    for (int64_t i = 0; i < tile.num_rows; ++i) {
      kernels_.operand.store_blocks(p_.out_operand, tile.first_row + i, tile.kv_head * blocks,
                                    blocks, outputs_ + i * cols_);
    }
  }

  // Those that the tile's row counts for; null: none.
  const ScoredRows* scored_of(const AttentionTile& tile) const {
    const ScoredRows* end = p_.scored + p_.num_scored;
    const auto* found = std::find_if(p_.scored, end, [&](const ScoredRows& each) {
      return each.sequence == tile.sequence && each.name == p_.mass;
    });
    return found == end ? nullptr : found;
  }

  const Kernels& kernels_;
  const AttentionProblem& p_;
  Team& team_;
  const int64_t count_;
  const int64_t cols_;  // of a KV head's group
  uint8_t* const scratch_;
  float* const queries_;
  float* const outputs_;
  int64_t next_ = 0;
  AttentionTask next_task_ = {};
  int64_t kept_place_ = 0;  // of weights that tasks have kept, or will
};

// Whatever the arithmetic.
const char* rejects_shape(const AttentionProblem& p) {
  if (p.num_kv_heads <= 0 || p.num_qo_heads <= 0 || p.num_qo_heads % p.num_kv_heads != 0) {
    return "heads is not a multiple of kv_heads";
  }
  if (p.positions != nullptr) return "rows are the last ones of their sequences";
  if (p.source == KeySource::rows) return nullptr;
  const DType dtype = p.k.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::i8) {
    return "kv_dtype is not f32, f16, bf16 or i8";
  }
  if (p.k.dims <= 0 || p.k.dims > 256 || p.k.dims % 16 != 0) {
    return "head_dim is not a multiple of 16 up to 256";
  }
  const int64_t group_cols = static_cast<int64_t>(p.num_qo_heads / p.num_kv_heads) * p.v.dims;
  if (p.out_operand.data != nullptr && group_cols % ops::kOperandBlock != 0) {
    return "the columns of a KV head's group are no whole blocks of the operand";
  }
  return nullptr;
}

const char* rejects(const AttentionProblem& p) {
  if (p.arithmetic != ops::Arithmetic::f32) return "multiplies in f32";
  return rejects_shape(p);
}

const char* rejects_bf16(const AttentionProblem& p) {
  if (p.arithmetic != ops::Arithmetic::bf16) return "multiplies in bf16";
  if (!p.mass.empty()) return "keeps no weights";
  if (!cpu_features().avx512_bf16) return "needs AVX512-BF16";
  if (p.source == KeySource::pages && p.k.dtype != DType::bf16) return "needs bf16 pages";
  if (p.k.dtype == DType::f32 || p.k.dtype == DType::f16) return "needs bf16 or 8-bit keys";
  return rejects_shape(p);
}

const char* rejects_amx(const AttentionProblem& p) {
  if (p.decode) return "a few rows multiply keys where they lie";
  if (dim_qk(p) % 32 != 0 || dim_vo(p) % 32 != 0) return "head_dim is not a multiple of 32";
  return rejects_bf16(p);
}

template <Level kLevel>
void run_attention(const AttentionProblem& p, Team& team) {
  const Kernels level = {kernels<kLevel, AttentionKernels>(),
                         kernels_at<RopeAppendKernel>(isa_of(kLevel)),
                         kernels_at<OperandKernels>(isa_of(kLevel))};
  Member(level, p, team).run();
}

}  // namespace

void register_attention() {
  auto& table = ops::mutable_table<AttentionProblem>();
  for_levels<Level::portable, Level::avx2, Level::avx512>([&]<Level kLevel>() {
    table.add({"attention." + std::string(name(kLevel)), isa_of(kLevel), rejects,
               run_attention<kLevel>, Member::scratch_bytes});
  });
  for_levels<Level::avx512bf16>([&]<Level kLevel>() {
    table.add({"attention.avx512.bf16", isa_of(kLevel), rejects_bf16, run_attention<kLevel>,
               Member::scratch_bytes});
  });
  for_levels<Level::amx>([&]<Level kLevel>() {
    table.add({"attention.amx.bf16", isa_of(kLevel), rejects_amx, run_attention<kLevel>,
               Member::scratch_bytes});
  });
}

}  // namespace effinfer::cpu
