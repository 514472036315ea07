// The arrays of a step's Batch, kept between steps so that a step does not allocate.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "effinfer/compiler.h"
#include "effinfer/kv_cache.h"

namespace effinfer::runtime {

class StepBatch {
 public:
  enum class Logits : uint8_t { none, last, all };

  void clear(Phase phase);
  // The last `tokens.size()` tokens of a sequence, appended already; logits of which rows.
  void add(const KvCache& cache, SequenceId sequence, std::span<const int32_t> tokens,
           Logits logits);
  size_t num_rows() const { return logit_rows_.size(); }
  size_t num_sequences() const { return kv_len_.size(); }
  Batch view() const;

 private:
  Phase phase_ = Phase::decode;
  std::vector<int32_t> token_ids_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> qo_indptr_;
  std::vector<int32_t> kv_indptr_;
  std::vector<int32_t> kv_indices_;
  std::vector<int32_t> kv_len_;
  std::vector<int32_t> logit_rows_;
};

}  // namespace effinfer::runtime
