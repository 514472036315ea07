// The drivers of the index kernels: scores of a step's keys, distances and pages, and from these
// the words of its lists (cpu/choose_tokens.h).
//
// Operators choose by attention_scores and pooled rows in place of these scores. Those know each
// row's log-sum-exp from a pass of attention over all rows before, and divide the keys among the
// team: results as large as rows x heads and heads x keys that must be allocated, and sums in
// another order. Here a member keeps the maxima and sums of 64 rows of one head in its scratch,
// walks the pages as they lie, and allocates nothing.
#include "cpu/prefill_index.h"

#include <algorithm>
#include <atomic>

#include "cpu/choose_tokens.h"
#include "cpu/register.h"
#include "ops/prefill_index.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::BlockIndexProblem;
using ops::ColumnIndexProblem;
using ops::IndexedHead;
using ops::kPageSize;
using ops::PageCandidates;
using ops::PrefillIndexInputs;
using ops::VisitBlock;
using ops::VisitSequence;

int64_t pages_of(const VisitBlock& block) {
  return (block.position + block.num_rows - 1) / kPageSize + 1;
}

AlwaysVisited always(const PrefillIndexInputs& in) {
  return {in.sink_tokens, in.local_tokens};
}

// The list of a block, as long as its rows' keys.
TokenSet list_of(const PrefillIndexInputs& in, int64_t block, int64_t kv_head) {
  return {in.visits.list(block, kv_head), pages_of(in.visits.blocks[block])};
}

template <class Problem>
bool is_dense(const Problem& p, int64_t sequence, int64_t kv_head) {
  return p.in.heads[kv_head] == IndexedHead::dense || !ops::chooses(p, sequence);
}

int64_t padded(int64_t tokens) {
  return (tokens + kPageSize - 1) / kPageSize * kPageSize;
}

// A member's memory for columns: sums by key and by distance, an order of either, a tile's own.
struct ColumnScratch {
  float* columns;
  float* diagonals;
  int32_t* order;
  float* tile;

  ColumnScratch(void* memory, int64_t max_kv_len) {
    columns = static_cast<float*>(memory);
    diagonals = columns + padded(max_kv_len);
    order = reinterpret_cast<int32_t*>(diagonals + padded(max_kv_len) + kPageSize);
    tile = reinterpret_cast<float*>(order + padded(max_kv_len));
  }
  static size_t bytes(const ColumnIndexProblem& p) {
    return static_cast<size_t>(3 * padded(p.in.max_kv_len) + kPageSize +
                               column_scratch_floats(p.in.kv.head_dim)) *
           sizeof(float);
  }
};

class ColumnMember {
 public:
  ColumnMember(const PrefillIndexKernels& level, const ColumnIndexProblem& p, void* scratch)
      : level_(level),
        p_(p),
        in_(p.in),
        group_(in_.num_qo_heads / in_.kv.num_kv_heads),
        scratch_(scratch, in_.max_kv_len) {}

  // The choice of one query head; whoever makes the last one of a group writes its lists.
  void run_item(int64_t index, int64_t head) {
    const VisitSequence& sequence = in_.visits.sequences[index];
    const int64_t kv_head = head / group_;
    if (in_.heads[kv_head] == IndexedHead::other) return;
    if (is_dense(p_, sequence.sequence, kv_head)) {
      if (head % group_ != 0) return;
      for (int32_t i = 0; i < sequence.num_blocks; ++i) {
        list_of(in_, sequence.first_block + i, kv_head).add_all();
      }
      return;
    }
    choose(index, sequence.sequence, head);
    std::atomic_ref<int32_t> done(in_.visits.done[index * in_.kv.num_kv_heads + kv_head]);
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < group_) return;
    done.store(0, std::memory_order_relaxed);
    for (int32_t i = 0; i < sequence.num_blocks; ++i) {
      write_list(index, sequence.first_block + i, kv_head);
    }
  }

 private:
  // Sets of the sequence's keys and distances, in memory that all members see.
  ChosenColumns chosen(int64_t index, int64_t head) const {
    const int64_t list_words = in_.visits.list_words;
    uint64_t* words = in_.visits.chosen + (index * in_.num_qo_heads + head) * 2 * list_words;
    const int64_t length = in_.batch.kv_len[in_.visits.sequences[index].sequence];
    const int64_t num_words = TokenSet::words_of(length);
    return {{words, num_words}, {words + list_words, num_words}};
  }

  void choose(int64_t index, int64_t sequence, int64_t head) {
    const int64_t length = in_.batch.kv_len[sequence];
    const bool slashes = p_.slashes.count > 0 || p_.slashes.mass > 0.0f;
    std::fill_n(scratch_.columns, padded(length), 0.0f);
    if (slashes) std::fill_n(scratch_.diagonals, padded(length) + kPageSize, 0.0f);
    if (p_.columns.count > 0 || p_.columns.mass > 0.0f || slashes) {
      add_scores(sequence, head, slashes);
    }
    const ChosenColumns to = chosen(index, head);
    to.keys.clear();
    to.distances.clear();
    choose_keys(scratch_.columns, length, p_.columns, scratch_.order, to.keys);
    if (!slashes) return;
    choose_distances(scratch_.diagonals, length, DistanceOrder::farthest_first, p_.slashes,
                     scratch_.order, to.distances);
  }

  void add_scores(int64_t sequence, int64_t head, bool slashes) {
    const int32_t first = in_.batch.qo_indptr[sequence];
    const int32_t end = in_.batch.qo_indptr[sequence + 1];
    const int32_t stride = p_.row_stride > 0 ? p_.row_stride : 1;
    int32_t count = (end - first - 1) / stride + 1;
    if (p_.row_stride <= 0) count = std::min(count, p_.last_rows);
    ColumnTile tile = {};
    tile.keys = index_keys(in_.kv, in_.batch, sequence, head / group_);
    tile.sm_scale = in_.sm_scale;
    tile.columns = scratch_.columns;
    tile.diagonals = slashes ? scratch_.diagonals : nullptr;
    tile.last_position = in_.batch.kv_len[sequence] - 1;
    tile.scratch = scratch_.tile;
    for (int32_t left = count; left > 0; left -= tile.num_rows) {
      tile.num_rows = std::min(left, kIndexRows);
      for (int32_t i = 0; i < tile.num_rows; ++i) {
        const int32_t behind = (left - 1 - i) * stride;  // the last row
        tile.q[i] = in_.q + (end - 1 - behind) * in_.q_stride + head * in_.kv.head_dim;
        tile.positions[i] = tile.last_position - behind;
        tile.factors[i] = 1.0f;
      }
      level_.columns(tile);
    }
  }

  void write_list(int64_t index, int64_t block_index, int64_t kv_head) const {
    const VisitBlock& block = in_.visits.blocks[block_index];
    const TokenSet list = list_of(in_, block_index, kv_head);
    list.clear();
    for (int64_t i = 0; i < group_; ++i) {
      add_columns(chosen(index, kv_head * group_ + i), block, list);
    }
    add_always(always(in_), block, list);
  }

  const PrefillIndexKernels& level_;
  const ColumnIndexProblem& p_;
  const PrefillIndexInputs& in_;
  const int64_t group_;
  const ColumnScratch scratch_;
};

// The lists of one block and KV head.
class BlockMember {
 public:
  BlockMember(const PrefillIndexKernels& level, const BlockIndexProblem& p, void* scratch)
      : level_(level), p_(p), in_(p.in), group_(group(p)) {
    const int64_t pages = padded(in_.max_kv_len) / kPageSize;
    scores_ = static_cast<float*>(scratch);
    order_ = reinterpret_cast<int32_t*>(scores_ + group_ * pages);
    tile_ = reinterpret_cast<float*>(order_ + pages);
  }

  static size_t scratch_bytes(const BlockIndexProblem& p) {
    const int64_t pages = padded(p.in.max_kv_len) / kPageSize;
    return static_cast<size_t>((group(p) + 1) * pages +
                               block_scratch_floats(group(p), ops::kVisitBlockRows, p.stride,
                                                    p.in.kv.head_dim, pages)) *
           sizeof(float);
  }

  void run_item(int64_t index, int64_t kv_head) const {
    if (in_.heads[kv_head] == IndexedHead::other) return;
    const VisitBlock& block = in_.visits.blocks[index];
    const TokenSet list = list_of(in_, index, kv_head);
    if (is_dense(p_, block.sequence, kv_head)) return list.add_all();
    list.clear();
    p_.has_budget() ? choose_together(index, kv_head, list) : choose_each(block, kv_head, list);
    add_always(always(in_), block, list);
  }

 private:
  // What any query head chooses of all pages.
  void choose_each(const VisitBlock& block, int64_t kv_head, TokenSet list) const {
    const int64_t pages = pages_of(block);
    score(block, kv_head, {0, pages});
    for (int64_t i = 0; i < group_; ++i) {
      add_blocks(scores_ + i * pages, pages, p_.pages, kPageSize, order_, list);
    }
  }

  // What all query heads choose of the pages that are not visited in any case.
  void choose_together(int64_t index, int64_t kv_head, TokenSet list) const {
    const VisitBlock& block = in_.visits.blocks[index];
    const PageCandidates pages = candidates_of(p_, block);
    const int64_t kept = chosen_pages(p_, pages.count());
    if (kept == pages.count()) return list.add_all();
    if (kept == 0) return;
    score(block, kv_head, pages);
    for (int64_t i = 1; i < group_; ++i) {
      const float* own = scores_ + i * pages.count();
      for (int64_t page = 0; page < pages.count(); ++page) scores_[page] += own[page];
    }
    const TokenSet to(in_.visits.list(index, kv_head) + pages.first, pages.count());
    add_blocks(scores_, pages.count(), {static_cast<int32_t>(kept), 0.0f}, kPageSize, order_, to);
  }

  // Of each query head, of these pages alone.
  void score(const VisitBlock& block, int64_t kv_head, const PageCandidates& pages) const {
    BlockTile tile = {};
    tile.keys = index_keys(in_.kv, in_.batch, block.sequence, kv_head);
    tile.keys.pages += pages.first;
    tile.q = in_.q + block.first_row * in_.q_stride + kv_head * group_ * in_.kv.head_dim;
    tile.q_stride = in_.q_stride;
    tile.num_rows = block.num_rows;
    tile.position = block.position - static_cast<int32_t>(pages.first * kPageSize);
    tile.group = static_cast<int32_t>(group_);
    tile.stride = p_.stride;
    tile.probe = p_.probe;
    tile.num_pages = static_cast<int32_t>(pages.count());
    tile.sm_scale = in_.sm_scale;
    tile.scores = scores_;
    tile.scratch = tile_;
    level_.blocks(tile);
  }

  static int64_t group(const BlockIndexProblem& p) {
    return p.in.num_qo_heads / p.in.kv.num_kv_heads;
  }

  const PrefillIndexKernels& level_;
  const BlockIndexProblem& p_;
  const PrefillIndexInputs& in_;
  const int64_t group_;
  float* scores_;
  int32_t* order_;
  float* tile_;
};

template <Level kLevel>
void run_columns(const ColumnIndexProblem& p, Team& team) {
  ColumnMember member(kernels<kLevel, PrefillIndexKernels>(), p, team.scratch());
  const int64_t heads = p.in.num_qo_heads;
  team.for_chunks(p.in.visits.num_sequences * heads,
                  [&](int64_t i) { member.run_item(i / heads, i % heads); });
}

template <Level kLevel>
void run_blocks(const BlockIndexProblem& p, Team& team) {
  const BlockMember member(kernels<kLevel, PrefillIndexKernels>(), p, team.scratch());
  const int64_t heads = p.in.kv.num_kv_heads;
  team.for_chunks(p.in.visits.num_blocks * heads,
                  [&](int64_t i) { member.run_item(i / heads, i % heads); });
}

const char* rejects_shape(const PrefillIndexInputs& in) {
  if (in.kv.head_dim <= 0 || in.kv.head_dim % 16 != 0) return "head_dim is not a multiple of 16";
  return nullptr;
}

template <class Problem>
const char* rejects(const Problem& p) {
  if (p.in.arithmetic != ops::Arithmetic::f32) return "multiplies in f32";
  return rejects_shape(p.in);
}

template <class Problem>
const char* rejects_bf16(const Problem& p) {
  if (p.in.arithmetic != ops::Arithmetic::bf16) return "multiplies in bf16";
  if (!cpu_features().avx512_bf16) return "needs AVX512-BF16";
  if (p.in.kv.dtype != DType::bf16) return "needs bf16 pages";
  return rejects_shape(p.in);
}

}  // namespace

void register_prefill_index() {
  auto& columns = ops::mutable_table<ColumnIndexProblem>();
  auto& blocks = ops::mutable_table<BlockIndexProblem>();
  for_levels<Level::portable, Level::avx2, Level::avx512>([&]<Level kLevel>() {
    const std::string level(name(kLevel));
    columns.add({"column_index." + level, isa_of(kLevel), rejects, run_columns<kLevel>,
                 ColumnScratch::bytes});
    blocks.add({"block_index." + level, isa_of(kLevel), rejects, run_blocks<kLevel>,
                BlockMember::scratch_bytes});
  });
  for_levels<Level::avx512bf16>([&]<Level kLevel>() {
    columns.add({"column_index.avx512.bf16", isa_of(kLevel), rejects_bf16, run_columns<kLevel>,
                 ColumnScratch::bytes});
    blocks.add({"block_index.avx512.bf16", isa_of(kLevel), rejects_bf16, run_blocks<kLevel>,
                BlockMember::scratch_bytes});
  });
}

}  // namespace effinfer::cpu
