#include "runtime/step_batch.h"

#include <numeric>

#include "ops/visits.h"

namespace effinfer::runtime {

void StepBatch::Tables::reserve(size_t sequences, size_t pages) {
  kv_indptr.reserve(sequences + 1);
  kv_indices.reserve(pages);
  kv_len.reserve(sequences);
}

void StepBatch::Tables::clear() {
  kv_indptr.assign(1, 0);
  kv_indices.clear();
  kv_len.clear();
}

void StepBatch::Tables::add(const KvCache& cache, SequenceId sequence, int32_t group) {
  const std::span<const int32_t> pages = cache.pages(sequence, group);
  for (const int32_t page : pages) {
    // Nobody reads a page that a window has freed, whatever stands for it.
    kv_indices.push_back(page >= 0 ? page : pages.back());
  }
  kv_indptr.push_back(static_cast<int32_t>(kv_indices.size()));
  kv_len.push_back(static_cast<int32_t>(cache.slots(sequence, group)));
}

void StepBatch::reserve(size_t tokens, size_t sequences, size_t pages, size_t groups) {
  for (auto* rows : {&token_ids_, &positions_, &logit_rows_}) rows->reserve(tokens);
  qo_indptr_.reserve(sequences + 1);
  tables_.reserve(sequences, pages);
  more_.resize(groups - 1);
  for (Tables& tables : more_) tables.reserve(sequences, pages);
  views_.reserve(more_.size());
  ancestors_.reserve(tokens);
  dense_.reserve(sequences);
  unchunked_.reserve(sequences);
}

void StepBatch::clear(Phase phase) {
  phase_ = phase;
  token_ids_.clear();
  positions_.clear();
  qo_indptr_.assign(1, 0);
  tables_.clear();
  for (Tables& tables : more_) tables.clear();
  logit_rows_.clear();
  ancestors_.clear();
  dense_.clear();
  unchunked_.clear();
  scored_.clear();
  weighted_.clear();
  has_trees_ = false;
  has_dense_ = false;
  has_unchunked_ = false;
}

void StepBatch::add(const KvCache& cache, SequenceId sequence, std::span<const int32_t> tokens,
                    Logits logits, const DraftTree* drafts, bool dense) {
  const size_t nodes = drafts == nullptr ? 0 : drafts->draft.tokens.size();
  const auto first = static_cast<int32_t>(cache.next_position(sequence) -
                                          static_cast<int64_t>(tokens.size() + nodes));
  const auto want_logits = [&] { logit_rows_.push_back(static_cast<int32_t>(token_ids_.size())); };
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (logits == Logits::all || (logits == Logits::last && i + 1 == tokens.size())) want_logits();
    token_ids_.push_back(tokens[i]);
    positions_.push_back(first + static_cast<int32_t>(i));
    ancestors_.push_back(0);
  }
  if (nodes > 0) add_drafts(*drafts, first + static_cast<int32_t>(tokens.size()) - 1);
  qo_indptr_.push_back(static_cast<int32_t>(token_ids_.size()));
  dense_.push_back(dense ? 1 : 0);
  has_dense_ |= dense;
  unchunked_.push_back(0);
  tables_.add(cache, sequence, 0);
  for (size_t i = 0; i < more_.size(); ++i) {
    more_[i].add(cache, sequence, static_cast<int32_t>(i) + 1);
  }
}

void StepBatch::add_scored(std::string_view name, const SlotPlane& plane, int32_t rows,
                           const SlotPlane& noise) {
  scored_.push_back({name, plane, static_cast<int32_t>(num_sequences()) - 1, rows, noise});
}

void StepBatch::add_weighted(std::string_view name, const SlotPlane& plane) {
  weighted_.push_back({name, plane, static_cast<int32_t>(num_sequences()) - 1});
}

void StepBatch::set_unchunked() {
  unchunked_.back() = 1;
  has_unchunked_ = true;
}

// Behind the row of the sequence's last token, which is at `root`. Words of a chain stay 0, unless
// it is so long that without them it would be taken for a prompt (ops/visits.h).
void StepBatch::add_drafts(const DraftTree& drafts, int32_t root) {
  const bool chain = drafts.is_chain() && drafts.words.size() < ops::kSparseRows;
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
  return std::accumulate(tables_.kv_len.begin(), tables_.kv_len.end(), int64_t{0});
}

Batch StepBatch::view() {
  Batch batch = {phase_,         token_ids_,        positions_,
                 qo_indptr_,     tables_.kv_indptr, tables_.kv_indices,
                 tables_.kv_len, logit_rows_};
  if (has_trees_) batch.ancestors = ancestors_;
  views_.clear();
  for (const Tables& tables : more_) {
    views_.push_back({tables.kv_indptr, tables.kv_indices, tables.kv_len});
  }
  if (has_dense_) batch.dense = dense_;
  if (has_unchunked_) batch.unchunked = unchunked_;
  batch.scored = scored_;
  batch.weighted = weighted_;
  batch.more_groups = views_;
  return batch;
}

}  // namespace effinfer::runtime
