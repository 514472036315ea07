// Steps of a draft model over its own cache: sequences that follow the texts of requests, and below
// each a tree of guesses that grows over several steps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "effinfer/compiler.h"
#include "effinfer/kv_cache.h"
#include "effinfer/sampling.h"
#include "effinfer/speculative.h"

namespace effinfer::runtime {

// A request's text in the draft's cache, and the rows of guesses behind it.
struct DraftText {
  SequenceId sequence = -1;
  bool published = false;
  struct Row {
    int32_t token;
    int32_t parent;  // a row; -1: the text's last token
    uint64_t word;   // Batch::ancestors, from the first row on
    int32_t depth;   // 1 behind the text
  };
  std::vector<Row> rows;
  // Of heads (head_steps.h), who see the text from its token `first` on (-1: not yet): what the
  // target had before its tokens from `hidden_first` on, and the states that rows of guesses go on
  // from, the text's last token first. [count, cols] both.
  int64_t first = -1;
  int64_t hidden_first = 0;
  std::vector<float> hidden;
  std::vector<float> states;
};

class DraftSteps {
 public:
  // A row's highest logits.
  struct Top {
    std::span<const float> values;  // the first is NaN where the row holds one
    std::span<const int32_t> tokens;
  };

  DraftSteps(std::shared_ptr<Executable> executable, int32_t num_pages, int32_t top_k);
  virtual ~DraftSteps() = default;

  // What a step gave a request; and whether all is known that drafts behind these tokens need.
  virtual void observe(const StepFacts&, DraftText&) {}
  virtual bool knows(const DraftText&, std::span<const int32_t>) const { return true; }
  // Makes room for the text: guesses that came true stay in the cache, the others go, and at least
  // the last token is left to feed. False: there are no pages.
  virtual bool follow(DraftText& text, std::span<const int32_t> tokens);
  // The same for a text that may differ from what is in the cache at any place, with guesses among
  // its tokens: what differs is rolled back.
  bool align(DraftText& text, std::span<const int32_t> tokens);
  virtual void release(DraftText& text);

  // Computes what of the texts is left to feed.
  virtual void feed(std::span<DraftText* const> texts);
  // A guess for the next grow(); false: there are no pages.
  bool add(DraftText& text, int32_t token, int32_t parent);
  // Computes the rows that were added since, of these texts in their order.
  virtual void grow(std::span<DraftText* const> texts);

  // Of the last feed() one a text, of the last grow() one a row.
  size_t num_tops() const { return logit_rows_.size(); }
  Top top(size_t row) const;

  // Rows of a step at most.
  int64_t max_rows() const {
    return std::min(executable_->options().max_tokens, executable_->options().max_rows);
  }
  // Looked at by steps; null: nobody cancels. A cancelled step throws Cancelled and commits
  // nothing.
  void set_cancel(const CancelToken* cancel) { cancel_ = cancel; }
  Executable& executable() const { return *executable_; }
  int64_t max_seq_len() const { return executable_->options().max_seq_len; }
  const KvCache& cache() const { return cache_; }

 protected:
  virtual void add_rows(const DraftText& text, int64_t first, int64_t last, bool as_tree);
  virtual void run(Phase phase);

  std::shared_ptr<Executable> executable_;
  KvCache cache_;
  Sampler sampler_;
  int32_t top_k_;
  const CancelToken* cancel_ = nullptr;
  bool shares_prefixes_ = true;
  std::vector<FloatInput> float_inputs_;
  std::vector<float> values_;

 private:
  void open(DraftText& text, std::span<const int32_t> tokens);
  void begin();

  std::vector<int32_t> tokens_;
  std::vector<float> logits_;  // where the head cannot keep the highest
  // The step at hand.
  std::vector<int32_t> token_ids_, positions_, qo_indptr_, kv_indptr_, kv_indices_, kv_len_,
      logit_rows_, tree_start_;
  std::vector<uint64_t> words_;
  bool has_trees_ = false;
};

}  // namespace effinfer::runtime
