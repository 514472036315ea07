#include "runtime/step_batch.h"

namespace effinfer::runtime {

void StepBatch::clear(Phase phase) {
  phase_ = phase;
  token_ids_.clear();
  positions_.clear();
  qo_indptr_.assign(1, 0);
  kv_indptr_.assign(1, 0);
  kv_indices_.clear();
  kv_len_.clear();
  logit_rows_.clear();
}

void StepBatch::add(const KvCache& cache, SequenceId sequence, std::span<const int32_t> tokens,
                    Logits logits) {
  const int32_t length = static_cast<int32_t>(cache.length(sequence));
  const int32_t first = length - static_cast<int32_t>(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (logits == Logits::all || (logits == Logits::last && i + 1 == tokens.size())) {
      logit_rows_.push_back(static_cast<int32_t>(token_ids_.size()));
    }
    token_ids_.push_back(tokens[i]);
    positions_.push_back(first + static_cast<int32_t>(i));
  }
  const std::span<const int32_t> pages = cache.pages(sequence);
  kv_indices_.insert(kv_indices_.end(), pages.begin(), pages.end());
  qo_indptr_.push_back(static_cast<int32_t>(token_ids_.size()));
  kv_indptr_.push_back(static_cast<int32_t>(kv_indices_.size()));
  kv_len_.push_back(length);
}

Batch StepBatch::view() const {
  return {phase_,     token_ids_,  positions_, qo_indptr_,
          kv_indptr_, kv_indices_, kv_len_,    logit_rows_};
}

}  // namespace effinfer::runtime
