#include "ops/visits.h"

#include <algorithm>

namespace effinfer::ops {

VisitBuffers::VisitBuffers(const VisitShape& shape, int64_t max_tokens, int64_t max_sequences,
                           int64_t max_kv_len)
    : shape_(shape), list_words_((max_kv_len + kPageSize - 1) / kPageSize) {
  const int64_t sequences = std::min(max_tokens / kSparseRows, max_sequences);
  const int64_t blocks = max_tokens / shape.block_rows + sequences;  // a last one of each is short
  blocks_.resize(static_cast<size_t>(blocks));
  sequences_.resize(static_cast<size_t>(sequences));
  first_block_.resize(static_cast<size_t>(max_sequences));
  words_.resize(static_cast<size_t>(blocks * shape.num_kv_heads * list_words_));
  chosen_.resize(static_cast<size_t>(sequences * shape.num_qo_heads * 2 * list_words_));
  done_.resize(static_cast<size_t>(sequences * shape.num_kv_heads));
}

VisitPlan VisitBuffers::plan(const BatchLayout& batch) {
  VisitPlan plan;
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int32_t begin = batch.qo_indptr[s];
    const int32_t end = batch.qo_indptr[s + 1];
    // Drafts of a tree are not rows at positions of their own.
    const bool sparse = end - begin >= kSparseRows && batch.ancestors == nullptr;
    first_block_[static_cast<size_t>(s)] = sparse ? static_cast<int32_t>(plan.num_blocks) : -1;
    if (!sparse) continue;
    VisitSequence& sequence = sequences_[static_cast<size_t>(plan.num_sequences++)];
    sequence = {static_cast<int32_t>(s), static_cast<int32_t>(plan.num_blocks), 0};
    for (int32_t row = begin; row < end; row += shape_.block_rows) {
      blocks_[static_cast<size_t>(plan.num_blocks++)] = {static_cast<int32_t>(s), row,
                                                         std::min(shape_.block_rows, end - row),
                                                         batch.kv_len[s] - (end - row)};
      ++sequence.num_blocks;
    }
  }
  plan.blocks = blocks_.data();
  plan.sequences = sequences_.data();
  plan.first_block = first_block_.data();
  plan.block_rows = shape_.block_rows;
  plan.num_kv_heads = shape_.num_kv_heads;
  plan.num_qo_heads = shape_.num_qo_heads;
  plan.list_words = list_words_;
  plan.words = words_.data();
  plan.chosen = chosen_.data();
  plan.done = done_.data();
  return plan;
}

}  // namespace effinfer::ops
