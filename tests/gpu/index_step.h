// A step over sequences of a cache, as the operators that choose keys see it: on the host, where
// their CPU kernels run, and on the device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "effinfer/threads.h"
#include "gpu/attention_batch.h"
#include "gpu/device_arrays.h"
#include "ops/prefill_index.h"
#include "ops/row_scores.h"
#include "ops/visits.h"

namespace effinfer {

class IndexStep {
 public:
  static constexpr uint64_t kUntouched = 0x5a5a5a5a5a5a5a5a;  // a word that nobody wrote
  static constexpr float kUnweighted = -77.0f;                // likewise a weight

  // Lists are of blocks of rows, or of each row; some say how often their keys count.
  IndexStep(const Cache& cache, const std::vector<Part>& parts, bool of_rows, bool weighted = false)
      : cache_(cache) {
    const Heads& heads = cache.heads();
    qo_indptr_ = kv_indptr_ = {0};
    for (const Part& part : parts) {
      const Sequence& s = cache.sequence(part.sequence);
      const int64_t width = int64_t{heads.qo_heads()} * heads.dims;
      q_.insert(q_.end(), s.q.begin() + (part.length - part.rows) * width,
                s.q.begin() + part.length * width);
      qo_indptr_.push_back(qo_indptr_.back() + part.rows);
      kv_len_.push_back(part.length);
      kv_indices_.insert(kv_indices_.end(), s.pages.begin(),
                         s.pages.begin() + (part.length + 63) / 64);
      kv_indptr_.push_back(static_cast<int32_t>(kv_indices_.size()));
      for (int32_t i = 0; i < part.rows; ++i) {
        paths_.push_back(part.paths.empty() ? 0 : part.paths[static_cast<size_t>(i)]);
      }
      most_ = std::max(most_, part.length);
    }
    layout_.num_tokens = qo_indptr_.back();
    layout_.num_sequences = static_cast<int64_t>(parts.size());
    layout_.qo_indptr = qo_indptr_.data();
    layout_.kv_indptr = kv_indptr_.data();
    layout_.kv_indices = kv_indices_.data();
    layout_.kv_len = kv_len_.data();
    layout_.ancestors = of_rows ? paths_.data() : nullptr;
    ops::VisitShape shape = {heads.qo_heads(), heads.kv_heads};
    shape.blocks = !of_rows;
    shape.rows = of_rows;
    (of_rows ? shape.row_weights : shape.block_weights) = weighted;
    buffers_ = ops::VisitBuffers(shape, layout_.num_tokens + 1, layout_.num_sequences, most_);
    plan_ = buffers_.plan(layout_);
    indexed_.assign(static_cast<size_t>(heads.kv_heads), ops::IndexedHead::chosen);
  }

  const Cache& cache() const { return cache_; }
  // For how many rows there is memory for scores at once.
  void set_scored(int64_t rows) { scored_ = rows; }
  const ops::VisitPlan& plan() const { return plan_; }
  std::vector<ops::IndexedHead>& indexed() { return indexed_; }
  // Of the last run: by list and slot the logarithms of how often keys count, and which lists say
  // so.
  const std::vector<float>& log_weights() const { return log_weights_; }
  const std::vector<uint8_t>& weighted() const { return weighted_; }
  void set_query(size_t index, float value) { q_[index] = value; }

  // Words [list][word] that run() writes, for which the problem's inputs are set: `In` is the
  // problem, or a part of it.
  template <class In>
  std::vector<uint64_t> on_cpu(In& in, const std::function<void(ThreadPool&)>& run) {
    static ThreadPool pool(2);
    const std::vector<uint8_t> k = cache_.key_bytes();
    const std::vector<float> scales = cache_.key_scales();
    set(in);
    if constexpr (kReadsKeys<In>) {
      in.kv.k = const_cast<uint8_t*>(k.data());
      in.kv.k_scale = const_cast<float*>(scales.data());
      in.q = q_.data();
    }
    in.batch = layout_;
    in.visits = plan_;
    in.heads = indexed_.data();
    std::fill_n(plan_.words, num_words(), kUntouched);
    if (plan_.has_weights()) std::fill_n(plan_.log_weights, 64 * num_words(), kUnweighted);
    run(pool);
    if (plan_.has_weights()) {
      log_weights_.assign(plan_.log_weights, plan_.log_weights + 64 * num_words());
      weighted_.assign(plan_.weighted, plan_.weighted + num_lists());
    }
    return {plan_.words, plan_.words + num_words()};
  }

  // Likewise on the device, with `more` behind the blocks of the plan.
  template <class In>
  std::vector<uint64_t> on_gpu(In& in, const std::vector<ops::VisitBlock>& more,
                               const std::function<void()>& run) {
    const DeviceArray<float> q(q_);
    const DeviceArray<int32_t> qo(qo_indptr_), kv(kv_indptr_), pages(kv_indices_), len(kv_len_);
    const DeviceArray<uint64_t> paths(paths_);
    const DeviceArray<ops::IndexedHead> indexed(indexed_);
    std::vector<ops::VisitBlock> all(plan_.blocks,
                                     plan_.blocks + plan_.num_blocks + plan_.num_rows);
    all.insert(all.end(), more.begin(), more.end());
    const DeviceArray<ops::VisitBlock> blocks(all);
    const DeviceArray<uint64_t> words(std::vector<uint64_t>(num_words(), kUntouched));
    const DeviceArray<int32_t> first_block(
        std::vector<int32_t>(plan_.first_block, plan_.first_block + layout_.num_sequences));
    set(in);
    if constexpr (kReadsKeys<In>) in.q = q.data();
    in.batch = layout_;
    in.batch.qo_indptr = qo.data();
    in.batch.kv_indptr = kv.data();
    in.batch.kv_indices = pages.data();
    in.batch.kv_len = len.data();
    if (layout_.ancestors != nullptr) in.batch.ancestors = paths.data();
    in.visits = plan_;
    in.visits.blocks = blocks.data();
    in.visits.first_block = first_block.data();
    in.visits.words = words.data();
    in.heads = indexed.data();
    const int64_t stride = ops::row_score_stride(plan_.list_words, ops::kPageSize);
    const DeviceArray<float> scores(static_cast<size_t>(
        scored_ * ops::row_score_heads(plan_.num_qo_heads, plan_.num_kv_heads) * stride));
    in.visits.row_scores = scores.data();
    in.visits.score_rows = scored_;
    const DeviceArray<float> weights(std::vector<float>(64 * num_words(), kUnweighted));
    const DeviceArray<uint8_t> weighted(static_cast<size_t>(num_lists()));
    in.visits.log_weights = weights.data();
    in.visits.weighted = weighted.data();
    run();
    log_weights_ = weights.values();
    weighted_ = weighted.values();
    return words.values();
  }

 private:
  int64_t num_lists() const { return (plan_.num_blocks + plan_.num_rows) * plan_.num_kv_heads; }
  size_t num_words() const { return static_cast<size_t>(num_lists() * plan_.list_words); }
  // Patterns do without.
  template <class In>
  static constexpr bool kReadsKeys = requires(In& in) { in.kv; };
  template <class In>
  void set(In& in) const {
    if constexpr (kReadsKeys<In>) {
      const Heads& heads = cache_.heads();
      const ops::PageBounds bounds = in.kv.bounds;  // the caller's
      in.kv = cache_.layer();
      in.kv.bounds = bounds;
      in.num_qo_heads = heads.qo_heads();
      in.q_stride = int64_t{heads.qo_heads()} * heads.dims;
      if constexpr (requires { in.sm_scale; }) {
        in.sm_scale = 1.0f / std::sqrt(static_cast<float>(heads.dims));
      }
      if constexpr (requires { in.max_kv_len; }) in.max_kv_len = most_;
    }
  }

  const Cache& cache_;
  std::vector<float> q_;
  std::vector<int32_t> qo_indptr_, kv_indptr_, kv_indices_, kv_len_;
  std::vector<uint64_t> paths_;
  int32_t most_ = 0;
  int64_t scored_ = 64;
  ops::BatchLayout layout_;
  ops::VisitBuffers buffers_;
  ops::VisitPlan plan_;
  std::vector<ops::IndexedHead> indexed_;
  std::vector<float> log_weights_;
  std::vector<uint8_t> weighted_;
};

}  // namespace effinfer
