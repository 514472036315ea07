#include "runtime/speculative/draft_steps.h"

#include <algorithm>
#include <cmath>

namespace effinfer::runtime {
namespace {

// Fewer rows are fed in the arithmetic of decoding, which is faster for them.
constexpr int64_t kShortFeed = 16;

int32_t size_of(const std::vector<int32_t>& list) {
  return static_cast<int32_t>(list.size());
}

}  // namespace

DraftSteps::DraftSteps(std::shared_ptr<Executable> executable, int32_t num_pages, int32_t top_k)
    : executable_(std::move(executable)),
      cache_(executable_->kv_config(*executable_->options().kv_dtype, num_pages)),
      sampler_(executable_->target().isa),
      top_k_(static_cast<int32_t>(std::min<int64_t>(top_k, executable_->vocab_size()))) {}

void DraftSteps::open(DraftText& text, std::span<const int32_t> tokens) {
  if (text.sequence >= 0) return;
  text.sequence = cache_.create(tokens);
  text.published = false;
  text.rows.clear();
}

bool DraftSteps::align(DraftText& text, std::span<const int32_t> tokens) {
  open(text, tokens);
  const std::span<const int32_t> known = cache_.tokens(text.sequence);
  // The last token is fed anew, so that there are logits behind it.
  const auto most = std::min(static_cast<ptrdiff_t>(cache_.committed(text.sequence)),
                             static_cast<ptrdiff_t>(tokens.size()) - 1);
  const auto same =
      std::mismatch(known.begin(), known.begin() + most, tokens.begin()).first - known.begin();
  cache_.rollback(text.sequence, static_cast<int64_t>(known.size()) - same);
  const std::span<const int32_t> rest = tokens.subspan(static_cast<size_t>(same));
  if (!cache_.can_append(text.sequence, static_cast<int64_t>(rest.size()))) return false;
  cache_.append(text.sequence, rest);
  return true;
}

bool DraftSteps::follow(DraftText& text, std::span<const int32_t> tokens) {
  open(text, tokens);
  const int64_t known = cache_.committed(text.sequence);
  std::vector<int32_t> kept;
  auto next = static_cast<size_t>(known);
  // The last token is fed anew, so that there are logits behind it.
  for (int32_t row = 0, at = -1; row < static_cast<int32_t>(text.rows.size()); ++row) {
    const DraftText::Row& guess = text.rows[static_cast<size_t>(row)];
    if (next + 1 >= tokens.size() || guess.parent != at || guess.token != tokens[next]) continue;
    kept.push_back(row);
    at = row;
    ++next;
  }
  if (cache_.length(text.sequence) - known != static_cast<int64_t>(text.rows.size())) kept.clear();
  cache_.keep(text.sequence, kept);
  text.rows.clear();
  const auto size = static_cast<int64_t>(tokens.size());
  const int64_t excess = cache_.length(text.sequence) - (size - 1);
  if (excess > 0) cache_.rollback(text.sequence, excess);
  const int64_t length = cache_.length(text.sequence);
  if (!cache_.can_append(text.sequence, size - length)) return false;
  cache_.append(text.sequence, tokens.subspan(static_cast<size_t>(length)));
  return true;
}

void DraftSteps::release(DraftText& text) {
  if (text.sequence < 0) return;
  cache_.release(text.sequence, true);
  text.sequence = -1;
  text.rows.clear();
}

void DraftSteps::begin() {
  for (auto* list :
       {&token_ids_, &positions_, &kv_indices_, &kv_len_, &logit_rows_, &tree_start_}) {
    list->clear();
  }
  qo_indptr_.assign(1, 0);
  kv_indptr_.assign(1, 0);
  words_.clear();
  has_trees_ = false;
}

// Tokens [first, last) of the sequence, which are appended already.
void DraftSteps::add_rows(const DraftText& text, int64_t first, int64_t last, bool as_tree) {
  const std::span<const int32_t> tokens = cache_.tokens(text.sequence);
  const int64_t start = cache_.committed(text.sequence);
  for (int64_t i = first; i < last; ++i) {
    token_ids_.push_back(tokens[static_cast<size_t>(i)]);
    if (as_tree) {
      const DraftText::Row& row = text.rows[static_cast<size_t>(i - start)];
      positions_.push_back(static_cast<int32_t>(start) + row.depth - 1);
      words_.push_back(row.word);
      logit_rows_.push_back(size_of(token_ids_) - 1);
    } else {
      positions_.push_back(static_cast<int32_t>(i));
      words_.push_back(0);
    }
  }
  has_trees_ = has_trees_ || as_tree;
  tree_start_.push_back(static_cast<int32_t>(as_tree ? start : first));
  const std::span<const int32_t> pages = cache_.pages(text.sequence);
  kv_indices_.insert(kv_indices_.end(), pages.begin(), pages.end());
  qo_indptr_.push_back(size_of(token_ids_));
  kv_indptr_.push_back(size_of(kv_indices_));
  kv_len_.push_back(static_cast<int32_t>(last));
}

void DraftSteps::run(Phase phase) {
  Batch batch = {phase,      token_ids_,  positions_, qo_indptr_,
                 kv_indptr_, kv_indices_, kv_len_,    logit_rows_};
  if (has_trees_) {
    batch.ancestors = words_;
    batch.tree_start = tree_start_;
  }
  batch.float_inputs = float_inputs_;
  const size_t rows = logit_rows_.size();
  const auto k = static_cast<size_t>(top_k_);
  values_.resize(rows * k);
  tokens_.resize(rows * k);
  if (executable_->max_top() >= top_k_) {
    executable_->run_top(batch, cache_, {top_k_, values_, tokens_}, cancel_);
    return;
  }
  const auto vocab = static_cast<size_t>(executable_->vocab_size());
  logits_.resize(rows * vocab);
  executable_->run(batch, cache_, logits_, cancel_);
  for (size_t row = 0; row < rows; ++row) {
    sampler_.highest(std::span(logits_).subspan(row * vocab, vocab),
                     std::span(values_).subspan(row * k, k),
                     std::span(tokens_).subspan(row * k, k));
  }
}

void DraftSteps::feed(std::span<DraftText* const> texts) {
  const int64_t most = executable_->options().max_tokens;
  const auto left = [&](const DraftText* text) {
    return cache_.length(text->sequence) - cache_.committed(text->sequence);
  };
  // Of a text that lacks many all but the last token, one text at a time.
  int64_t together = 0;
  auto later = static_cast<int64_t>(texts.size());  // texts, which have a row each at least
  for (const DraftText* text : texts) {
    --later;
    const bool is_long = left(text) > kShortFeed || together + left(text) + later > most;
    while (is_long && left(text) > 1) {
      const int64_t count = std::min(left(text) - 1, most);
      const int64_t first = cache_.committed(text->sequence);
      begin();
      add_rows(*text, first, first + count, false);
      run(count > kShortFeed ? Phase::prefill : Phase::decode);
      cache_.commit(text->sequence, count);
    }
    together += left(text);
  }
  begin();
  for (const DraftText* text : texts) {
    add_rows(*text, cache_.committed(text->sequence), cache_.length(text->sequence), false);
    logit_rows_.push_back(size_of(token_ids_) - 1);
  }
  run(Phase::decode);
  for (DraftText* text : texts) {
    cache_.commit(text->sequence, left(text));
    if (shares_prefixes_ && !text->published) cache_.publish(text->sequence);
    text->published = true;
  }
}

bool DraftSteps::add(DraftText& text, int32_t token, int32_t parent) {
  if (!cache_.can_append(text.sequence, 1)) return false;
  cache_.append(text.sequence, {&token, 1});
  const uint64_t above = parent < 0 ? 0 : text.rows[static_cast<size_t>(parent)].word;
  const int32_t depth = parent < 0 ? 1 : text.rows[static_cast<size_t>(parent)].depth + 1;
  text.rows.push_back({token, parent, above | uint64_t{1} << text.rows.size(), depth});
  return true;
}

void DraftSteps::grow(std::span<DraftText* const> texts) {
  begin();
  for (DraftText* text : texts) {
    // Rows of one level: those of the greatest depth.
    const int32_t level = text->rows.back().depth;
    const auto first = std::find_if(text->rows.begin(), text->rows.end(),
                                    [&](const DraftText::Row& row) { return row.depth == level; });
    add_rows(*text, cache_.committed(text->sequence) + (first - text->rows.begin()),
             cache_.length(text->sequence), true);
  }
  run(Phase::decode);
}

DraftSteps::Top DraftSteps::top(size_t row) const {
  const auto k = static_cast<size_t>(top_k_);
  return {std::span(values_).subspan(row * k, k), std::span(tokens_).subspan(row * k, k)};
}

}  // namespace effinfer::runtime
