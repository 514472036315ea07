#include "runtime/step_batch.h"

#include <numeric>

namespace effinfer::runtime {

void StepBatch::reserve(size_t tokens, size_t sequences, size_t pages) {
  for (auto* rows : {&token_ids_, &positions_, &logit_rows_}) rows->reserve(tokens);
  for (auto* ends : {&qo_indptr_, &kv_indptr_, &kv_len_}) ends->reserve(sequences + 1);
  kv_indices_.reserve(pages);
  ancestors_.reserve(tokens);
}

void StepBatch::clear(Phase phase) {
  phase_ = phase;
  token_ids_.clear();
  positions_.clear();
  qo_indptr_.assign(1, 0);
  kv_indptr_.assign(1, 0);
  kv_indices_.clear();
  kv_len_.clear();
  logit_rows_.clear();
  ancestors_.clear();
  has_trees_ = false;
}

void StepBatch::add(const KvCache& cache, SequenceId sequence, std::span<const int32_t> tokens,
                    Logits logits, const DraftTree* drafts) {
  const int32_t length = static_cast<int32_t>(cache.length(sequence));
  const size_t nodes = drafts == nullptr ? 0 : drafts->draft.tokens.size();
  const int32_t first = length - static_cast<int32_t>(tokens.size() + nodes);
  const auto want_logits = [&] { logit_rows_.push_back(static_cast<int32_t>(token_ids_.size())); };
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (logits == Logits::all || (logits == Logits::last && i + 1 == tokens.size())) want_logits();
    token_ids_.push_back(tokens[i]);
    positions_.push_back(first + static_cast<int32_t>(i));
    ancestors_.push_back(0);
  }
  if (nodes > 0) add_drafts(*drafts, first + static_cast<int32_t>(tokens.size()) - 1);
  const std::span<const int32_t> pages = cache.pages(sequence);
  kv_indices_.insert(kv_indices_.end(), pages.begin(), pages.end());
  qo_indptr_.push_back(static_cast<int32_t>(token_ids_.size()));
  kv_indptr_.push_back(static_cast<int32_t>(kv_indices_.size()));
  kv_len_.push_back(length);
}

// Behind the row of the sequence's last token, which is at `root`. Words of a chain stay 0.
void StepBatch::add_drafts(const DraftTree& drafts, int32_t root) {
  const bool chain = drafts.is_chain();
  if (!chain) {
    ancestors_.back() = drafts.words.front();
    has_trees_ = true;
  }
  for (size_t i = 0; i < drafts.draft.tokens.size(); ++i) {
    logit_rows_.push_back(static_cast<int32_t>(token_ids_.size()));
    token_ids_.push_back(drafts.draft.tokens[i]);
    positions_.push_back(root + drafts.depths[i + 1]);
    ancestors_.push_back(chain ? 0 : drafts.words[i + 1]);
  }
}

int64_t StepBatch::kv_tokens() const {
  return std::accumulate(kv_len_.begin(), kv_len_.end(), int64_t{0});
}

Batch StepBatch::view() const {
  Batch batch = {phase_,     token_ids_,  positions_, qo_indptr_,
                 kv_indptr_, kv_indices_, kv_len_,    logit_rows_};
  if (has_trees_) batch.ancestors = ancestors_;
  return batch;
}

}  // namespace effinfer::runtime
