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
};

class DraftSteps {
 public:
  // A row's highest logits.
  struct Top {
    std::span<const float> values;  // the first is NaN where the row holds one
    std::span<const int32_t> tokens;
  };

  DraftSteps(std::shared_ptr<Executable> executable, int32_t num_pages, int32_t top_k);

  // Makes room for the text: guesses that came true stay in the cache, the others go, and at least
  // the last token is left to feed. False: there are no pages.
  bool follow(DraftText& text, std::span<const int32_t> tokens);
  void release(DraftText& text);

  // Computes what of the texts is left to feed.
  void feed(std::span<DraftText* const> texts);
  // A guess for the next grow(); false: there are no pages.
  bool add(DraftText& text, int32_t token, int32_t parent);
  // Computes the rows that were added since, of these texts in their order.
  void grow(std::span<DraftText* const> texts);

  // Of the last feed() one a text, of the last grow() one a row.
  size_t num_tops() const { return logit_rows_.size(); }
  Top top(size_t row) const;

  // Rows of a step at most.
  int64_t max_rows() const {
    return std::min(executable_->options().max_tokens, executable_->options().max_rows);
  }
  int64_t max_seq_len() const { return executable_->options().max_seq_len; }
  const KvCache& cache() const { return cache_; }

 private:
  void begin();
  void add_rows(const DraftText& text, int64_t first, int64_t last, bool as_tree);
  void run(Phase phase);

  std::shared_ptr<Executable> executable_;
  KvCache cache_;
  Sampler sampler_;
  int32_t top_k_;
  std::vector<float> values_;
  std::vector<int32_t> tokens_;
  std::vector<float> logits_;  // where the head cannot keep the highest
  // The step at hand.
  std::vector<int32_t> token_ids_, positions_, qo_indptr_, kv_indptr_, kv_indices_, kv_len_,
      logit_rows_, tree_start_;
  std::vector<uint64_t> words_;
  bool has_trees_ = false;
};

}  // namespace effinfer::runtime
