// The arrays of a step's Batch, kept between steps so that a step does not allocate.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "effinfer/compiler.h"
#include "effinfer/kv_cache.h"
#include "runtime/speculative/draft.h"

namespace effinfer::runtime {

class StepBatch {
 public:
  enum class Logits : uint8_t { none, last, all };

  // Memory for steps of so many tokens over a cache of so many groups of layers; pages that
  // sequences share count for each of them.
  void reserve(size_t tokens, size_t sequences, size_t pages, size_t groups = 1);
  void clear(Phase phase);
  // The last `tokens.size()` tokens of a sequence, appended already; logits of which rows. With
  // drafts (null: none) these are appended behind them, and the logits of their rows are wanted
  // too. dense: whether they visit all keys, whatever the graph chooses.
  void add(const KvCache& cache, SequenceId sequence, std::span<const int32_t> tokens,
           Logits logits, const DraftTree* drafts = nullptr, bool dense = false);
  // Of the sequence that was added last: its last rows add what they attend to.
  void add_scored(std::string_view name, const SlotPlane& plane, int32_t rows,
                  const SlotPlane& noise = {});
  // Of the same: how often attention counts its keys.
  void add_weighted(std::string_view name, const SlotPlane& plane);
  // Of the same: its keys are in no chunks, whatever the graph knows.
  void set_unchunked();
  size_t num_rows() const { return logit_rows_.size(); }
  size_t num_sequences() const { return tables_.kv_len.size(); }
  size_t num_tokens() const { return token_ids_.size(); }
  int64_t kv_tokens() const;  // of all sequences
  Batch view();               // valid until the next change

 private:
  // The page table of a sequence in one group of layers.
  struct Tables {
    std::vector<int32_t> kv_indptr;
    std::vector<int32_t> kv_indices;
    std::vector<int32_t> kv_len;

    void reserve(size_t sequences, size_t pages);
    void clear();
    void add(const KvCache& cache, SequenceId sequence, int32_t group);
  };

  void add_drafts(const DraftTree& drafts, int32_t root);

  Phase phase_ = Phase::decode;
  std::vector<int32_t> token_ids_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> qo_indptr_;
  Tables tables_;
  std::vector<Tables> more_;     // of the groups behind the first
  std::vector<KvTables> views_;  // of these, as the batch has them
  std::vector<int32_t> logit_rows_;
  std::vector<uint64_t> ancestors_;
  std::vector<uint8_t> dense_;
  std::vector<uint8_t> unchunked_;
  std::vector<ScoredRows> scored_;
  std::vector<WeightedSlots> weighted_;
  bool has_trees_ = false;
  bool has_dense_ = false;
  bool has_unchunked_ = false;
};

}  // namespace effinfer::runtime
