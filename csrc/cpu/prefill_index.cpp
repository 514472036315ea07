// The drivers of the index kernels: from scores to the words of lists.
#include "cpu/prefill_index.h"

#include <algorithm>
#include <atomic>
#include <bit>

#include "cpu/register.h"
#include "ops/choose_top.h"
#include "ops/prefill_index.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::BlockIndexProblem;
using ops::ColumnIndexProblem;
using ops::IndexedHead;
using ops::kPageSize;
using ops::PrefillIndexInputs;
using ops::VisitBlock;
using ops::VisitSequence;

// What does not exist of [begin, end) is left out.
void set_bits(uint64_t* words, int64_t num_words, int64_t begin, int64_t end) {
  begin = std::max<int64_t>(begin, 0);
  end = std::min(end, num_words * 64);
  while (begin < end) {
    const int64_t count = std::min(end - begin, 64 - begin % 64);
    words[begin / 64] |= ~uint64_t{0} >> (64 - count) << begin % 64;
    begin += count;
  }
}

template <class Visit>
void for_bits(const uint64_t* words, int64_t num_words, Visit&& visit) {
  for (int64_t i = 0; i < num_words; ++i) {
    for (uint64_t bits = words[i]; bits != 0; bits &= bits - 1) {
      visit(i * 64 + std::countr_zero(bits));
    }
  }
}

int64_t pages_of(const VisitBlock& block) {
  return (block.position + block.num_rows - 1) / kPageSize + 1;
}

// Whatever is chosen.
void add_always(const PrefillIndexInputs& in, const VisitBlock& block, uint64_t* words) {
  const int64_t pages = pages_of(block);
  set_bits(words, pages, 0, in.sink_tokens);
  const int64_t first = in.local_tokens > 0 ? block.position - in.local_tokens + 1 : block.position;
  set_bits(words, pages, first, block.position + block.num_rows);
}

IndexKeys keys_of(const PrefillIndexInputs& in, int64_t sequence, int64_t kv_head) {
  IndexKeys keys = {};
  keys.dtype = in.kv.dtype;
  keys.head_dim = in.kv.head_dim;
  keys.k = in.kv.k_head(0, kv_head);
  keys.page_bytes = static_cast<int64_t>(in.kv.head_bytes()) * in.kv.num_kv_heads;
  if (in.kv.dtype == DType::i8) {
    keys.k_scale = in.kv.k_scale + kv_head * kPageSize;
    keys.page_scales = in.kv.num_kv_heads * kPageSize;
  }
  keys.pages = in.batch.kv_indices + in.batch.kv_indptr[sequence];
  return keys;
}

bool is_dense(const PrefillIndexInputs& in, int64_t sequence, int64_t kv_head) {
  return in.heads[kv_head] == IndexedHead::dense || in.batch.kv_len[sequence] < in.min_tokens;
}

void visit_all(const PrefillIndexInputs& in, int64_t block, int64_t kv_head) {
  uint64_t* words = in.visits.list(block, kv_head);
  std::fill_n(words, pages_of(in.visits.blocks[block]), ~uint64_t{0});
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
    if (is_dense(in_, sequence.sequence, kv_head)) {
      if (head % group_ != 0) return;
      for (int32_t i = 0; i < sequence.num_blocks; ++i) {
        visit_all(in_, sequence.first_block + i, kv_head);
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
  uint64_t* chosen(int64_t index, int64_t head) const {
    return in_.visits.chosen + (index * in_.num_qo_heads + head) * 2 * in_.visits.list_words;
  }

  void choose(int64_t index, int64_t sequence, int64_t head) {
    const int64_t length = in_.batch.kv_len[sequence];
    const bool slashes = p_.slashes.count > 0 || p_.slashes.mass > 0.0f;
    std::fill_n(scratch_.columns, padded(length), 0.0f);
    if (slashes) std::fill_n(scratch_.diagonals, padded(length) + kPageSize, 0.0f);
    if (p_.columns.count > 0 || p_.columns.mass > 0.0f || slashes) {
      add_scores(sequence, head, slashes);
    }
    uint64_t* columns = chosen(index, head);
    uint64_t* distances = columns + in_.visits.list_words;
    const int64_t words = padded(length) / 64;
    std::fill_n(columns, words, 0);
    std::fill_n(distances, words, 0);
    int64_t count = ops::choose_top(scratch_.columns, length, p_.columns, scratch_.order);
    for (int64_t i = 0; i < count; ++i) set_bit(columns, scratch_.order[i]);
    if (!slashes) return;
    count = ops::choose_top(scratch_.diagonals, length, p_.slashes, scratch_.order);
    for (int64_t i = 0; i < count; ++i) set_bit(distances, length - 1 - scratch_.order[i]);
  }

  static void set_bit(uint64_t* words, int64_t bit) { words[bit / 64] |= uint64_t{1} << bit % 64; }

  void add_scores(int64_t sequence, int64_t head, bool slashes) {
    const int32_t first = in_.batch.qo_indptr[sequence];
    const int32_t end = in_.batch.qo_indptr[sequence + 1];
    const int32_t stride = p_.row_stride > 0 ? p_.row_stride : 1;
    int32_t count = (end - first - 1) / stride + 1;
    if (p_.row_stride <= 0) count = std::min(count, p_.last_rows);
    ColumnTile tile = {};
    tile.keys = keys_of(in_, sequence, head / group_);
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
      }
      level_.columns(tile);
    }
  }

  void write_list(int64_t index, int64_t block_index, int64_t kv_head) const {
    const VisitBlock& block = in_.visits.blocks[block_index];
    const int64_t pages = pages_of(block);
    uint64_t* words = in_.visits.list(block_index, kv_head);
    std::fill_n(words, pages, 0);
    for (int64_t i = 0; i < group_; ++i) {
      const uint64_t* columns = chosen(index, kv_head * group_ + i);
      for (int64_t page = 0; page < pages; ++page) words[page] |= columns[page];
      for_bits(columns + in_.visits.list_words, pages, [&](int64_t distance) {
        const int64_t begin = block.position - distance;
        set_bits(words, pages, begin, begin + block.num_rows);
      });
    }
    add_always(in_, block, words);
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
    if (is_dense(in_, block.sequence, kv_head)) return visit_all(in_, index, kv_head);
    const int64_t pages = pages_of(block);
    BlockTile tile = {};
    tile.keys = keys_of(in_, block.sequence, kv_head);
    tile.q = in_.q + block.first_row * in_.q_stride + kv_head * group_ * in_.kv.head_dim;
    tile.q_stride = in_.q_stride;
    tile.num_rows = block.num_rows;
    tile.position = block.position;
    tile.group = static_cast<int32_t>(group_);
    tile.stride = p_.stride;
    tile.num_pages = static_cast<int32_t>(pages);
    tile.sm_scale = in_.sm_scale;
    tile.scores = scores_;
    tile.scratch = tile_;
    level_.blocks(tile);
    uint64_t* words = in_.visits.list(index, kv_head);
    std::fill_n(words, pages, 0);
    for (int64_t i = 0; i < group_; ++i) {
      const int64_t count = ops::choose_top(scores_ + i * pages, pages, p_.pages, order_);
      for (int64_t j = 0; j < count; ++j) words[order_[j]] = ~uint64_t{0};
    }
    add_always(in_, block, words);
  }

 private:
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

const char* rejects_inputs(const PrefillIndexInputs& in) {
  if (in.kv.head_dim <= 0 || in.kv.head_dim % 16 != 0) return "head_dim is not a multiple of 16";
  return nullptr;
}

template <class Problem>
const char* rejects(const Problem& p) {
  return rejects_inputs(p.in);
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
}

}  // namespace effinfer::cpu
