// Batches of attention on the GPU over the sequences of attention_cache.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "core/float16.h"
#include "cpp/check.h"
#include "gpu/attention_cache.h"
#include "gpu/device_arrays.h"
#include "gpu/device_work.h"
#include "gpu/divided_pages.h"
#include "ops/attention.h"

namespace effinfer {

// What decides a row's result beside its numbers.
struct Rules {
  bool causal = true;
  int32_t window_left = -1;
  int32_t sink_tokens = 0;
  float soft_cap = 0.0f;
  std::vector<float> slopes;
  std::vector<float> sinks;
  std::vector<float> first_logits = {};  // of sequences that have a plane
  int32_t chunk = 0;                     // of keys
};

// Queries for keys so many chunks away, 2: or more, have the same numbers in another order, and
// others that float16 scales otherwise.
inline int64_t query_dim(int distance, int64_t dim, int64_t dims) {
  return distance == 0 ? dim : distance == 1 ? dims - 1 - dim : (dim + dims / 2) % dims;
}
inline float query_factor(int distance) {
  return distance == 2 ? 4.0f : 1.0f;
}

// The last `rows` tokens of the first `length` of a sequence.
struct Part {
  int sequence;
  int32_t length;
  int32_t rows;
  std::vector<uint64_t> paths = {};               // of a tree
  int32_t tree_start = -1;                        // -1: where the rows begin
  std::vector<std::vector<uint64_t>> words = {};  // [block of 64 rows * kv_heads][word]: visits
  // Of as many lists, by slot: the logarithms of how often keys count; none: once.
  std::vector<std::vector<float>> log_weights = {};
  // [kv head][slot, to the end of a page]: a plane of the same, for all rows; none: there is none.
  std::vector<float> plane = {};
  bool unchunked = false;

  // Drafts count once, and nobody reads behind the last slot.
  template <class Random>
  void weigh_slots(Random& random, int32_t kv_heads) {
    const int32_t weighed = tree_start >= 0 ? tree_start : paths.empty() ? length : length - rows;
    for (int32_t head = 0; head < kv_heads; ++head) {
      for (int32_t slot = 0; slot < (length + 63) / 64 * 64; ++slot) {
        const auto weight = static_cast<float>(random() % 4);
        plane.push_back(slot < weighed ? weight : slot < length ? 0.0f : std::nanf(""));
      }
    }
  }

  // Anything for keys that are not visited.
  template <class Random>
  void weigh(Random& random) {
    for (const std::vector<uint64_t>& list : words) {
      std::vector<float>& to = log_weights.emplace_back();
      for (size_t slot = 0; slot < 64 * list.size(); ++slot) {
        const bool visited = (list[slot / 64] >> slot % 64 & 1) != 0;
        to.push_back(visited ? static_cast<float>(random() % 4) : std::nanf(""));
      }
    }
  }
};

struct Results {
  std::vector<float> out;  // [row][qo head][dim]
  std::vector<float> lse;  // [row][qo head]
};

// How a batch is run.
struct Launch {
  int32_t shares = 64;
  std::optional<ops::Arithmetic> operand = {};
  int32_t long_rows = 0;  // of tiles of prompts
  bool own_sums = false;  // as prompts in a phase of their own
  // Pages of KV heads that may be re-arranged first, however few tiles read them.
  int64_t arranged = 0;
  bool far = false;  // half of the pages are in memory of their own
};

class Batch {
 public:
  Batch(const Cache& cache, const Rules& rules, std::vector<Part> parts)
      : cache_(cache), heads_(cache.heads()), rules_(rules), parts_(std::move(parts)) {
    for (const Part& part : parts_) add(part);
  }

  int64_t num_rows() const { return qo_indptr_.back(); }
  const std::vector<Part>& parts() const { return parts_; }

  // Of this batch; the cache keeps those that were drawn.
  void scale_queries(float factor) {
    for (float& x : q_) x *= factor;
  }

  Results run(const Launch& how = {}) const;

 private:
  void add(const Part& part) {
    const Sequence& s = cache_.sequence(part.sequence);
    qo_indptr_.push_back(qo_indptr_.back() + part.rows);
    kv_len_.push_back(part.length);
    kv_indices_.insert(kv_indices_.end(), s.pages.begin(),
                       s.pages.begin() + (part.length + 63) / 64);
    kv_indptr_.push_back(static_cast<int32_t>(kv_indices_.size()));
    const auto width = static_cast<int64_t>(heads_.qo_heads()) * heads_.dims;
    q_.insert(q_.end(), s.q.begin() + (part.length - part.rows) * width,
              s.q.begin() + part.length * width);
    for (int32_t i = 0; i < part.rows; ++i) {
      paths_.push_back(part.paths.empty() ? 0 : part.paths[static_cast<size_t>(i)]);
    }
    tree_start_.push_back(part.tree_start >= 0 ? part.tree_start : part.length - part.rows);
    first_block_.push_back(part.words.empty() ? -1 : num_blocks_);
    for (const auto& list : part.words) {
      list_words_ = std::max(list_words_, static_cast<int64_t>(list.size()));
    }
    num_blocks_ += static_cast<int32_t>(part.words.size()) / heads_.kv_heads;
  }

  ops::AttentionShape shape(const Launch& how) const {
    ops::AttentionShape shape;
    shape.num_qo_heads = heads_.qo_heads();
    shape.num_kv_heads = heads_.kv_heads;
    shape.head_dim = heads_.dims;
    shape.causal = rules_.causal;
    shape.window_left = rules_.window_left;
    shape.sink_tokens = rules_.sink_tokens;
    shape.chunk = rules_.chunk;
    shape.visits = list_words_ > 0;
    shape.most_rows = 16;
    shape.long_rows = how.long_rows;
    shape.only_long = how.own_sums;
    shape.shares = how.shares;
    shape.most_arranged = how.arranged;
    shape.arranged_reads = 0;
    return shape;
  }
  void set_rules(ops::AttentionProblem& p) const {
    p.causal = rules_.causal;
    p.window_left = rules_.window_left;
    p.sink_tokens = rules_.sink_tokens;
    p.sm_scale = 1.0f / std::sqrt(static_cast<float>(heads_.dims));
    p.logits_soft_cap = rules_.soft_cap;
  }
  ops::BatchLayout host_layout() const {
    ops::BatchLayout layout;
    layout.num_tokens = num_rows();
    layout.num_sequences = static_cast<int64_t>(kv_len_.size());
    layout.qo_indptr = qo_indptr_.data();
    layout.kv_indptr = kv_indptr_.data();
    layout.kv_indices = kv_indices_.data();
    layout.kv_len = kv_len_.data();
    layout.ancestors = paths_.data();
    layout.tree_start = tree_start_.data();
    return layout;
  }
  std::vector<uint8_t> queries(int distance) const {
    const auto bytes = static_cast<size_t>(dtype_info(heads_.q).block_bytes);
    std::vector<uint8_t> q(q_.size() * bytes);
    for (size_t i = 0; i < q_.size(); ++i) {
      const auto dim = static_cast<int64_t>(i) % heads_.dims;
      const int64_t other = query_dim(distance, dim, heads_.dims) - dim;
      const float x =
          q_[static_cast<size_t>(static_cast<int64_t>(i) + other)] * query_factor(distance);
      const uint16_t bits = heads_.q == DType::f16 ? f32_to_f16(x) : f32_to_bf16(x);
      std::memcpy(q.data() + i * bytes,
                  bytes == 4 ? static_cast<const void*>(&x) : static_cast<const void*>(&bits),
                  bytes);
    }
    return q;
  }
  std::vector<uint8_t> all_unchunked() const {
    std::vector<uint8_t> flags;
    for (const Part& part : parts_) flags.push_back(part.unchunked ? 1 : 0);
    return flags;
  }
  // Those of lists without any are NaN, which nobody asks for.
  std::vector<float> all_weights() const {
    std::vector<float> weights;
    for (const Part& part : parts_) {
      for (size_t list = 0; list < part.words.size(); ++list) {
        const size_t end = weights.size() + static_cast<size_t>(64 * list_words_);
        if (!part.log_weights.empty()) {
          const std::vector<float>& own = part.log_weights[list];
          weights.insert(weights.end(), own.begin(), own.end());
        }
        weights.resize(end, std::nanf(""));
      }
    }
    return weights;
  }
  std::vector<uint8_t> all_weighted() const {
    std::vector<uint8_t> weighted;
    for (const Part& part : parts_) {
      weighted.resize(weighted.size() + part.words.size(), part.log_weights.empty() ? 0 : 1);
    }
    return weighted;
  }
  // One behind the other, and where each begins; -1: it has none.
  std::vector<float> all_planes(std::vector<int64_t>& starts) const {
    std::vector<float> planes;
    for (const Part& part : parts_) {
      starts.push_back(part.plane.empty() ? -1 : static_cast<int64_t>(planes.size()));
      planes.insert(planes.end(), part.plane.begin(), part.plane.end());
    }
    return planes;
  }
  std::vector<uint64_t> all_words() const {
    std::vector<uint64_t> words;
    for (const Part& part : parts_) {
      for (const auto& list : part.words) {
        words.insert(words.end(), list.begin(), list.end());
        words.resize(words.size() + static_cast<size_t>(list_words_) - list.size());
      }
    }
    return words;
  }

  const Cache& cache_;
  const Heads heads_;
  const Rules rules_;
  const std::vector<Part> parts_;
  std::vector<int32_t> qo_indptr_{0}, kv_indptr_{0}, kv_indices_, kv_len_, tree_start_;
  std::vector<int32_t> first_block_;
  std::vector<uint64_t> paths_;
  std::vector<float> q_;
  int32_t num_blocks_ = 0;
  int64_t list_words_ = 0;
};

inline std::vector<float> widened(const std::vector<uint8_t>& bytes, DType dtype) {
  const auto size = static_cast<size_t>(dtype_info(dtype).block_bytes);
  std::vector<float> values(bytes.size() / size);
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(size == 4 ? static_cast<void*>(&values[i]) : static_cast<void*>(&bits),
                bytes.data() + i * size, size);
    if (size == 2) values[i] = dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
  }
  return values;
}

// Of rows of an operand, whose padding must be zeros.
inline std::vector<float> rows_of(const std::vector<uint8_t>& bytes, const ops::Operand& operand) {
  const DType dtype = operand.arithmetic == ops::Arithmetic::f32 ? DType::f32 : DType::bf16;
  std::vector<float> values;
  for (int64_t row = 0; row < operand.rows; ++row) {
    const auto first = bytes.begin() + row * operand.row_bytes();
    const int64_t padded = ops::padded_cols(operand.cols) * dtype_info(dtype).block_bytes;
    const std::vector<float> all = widened({first, first + padded}, dtype);
    for (size_t i = static_cast<size_t>(operand.cols); i < all.size(); ++i) CHECK_EQ(all[i], 0.0f);
    values.insert(values.end(), all.begin(), all.begin() + operand.cols);
  }
  return values;
}

inline Results Batch::run(const Launch& how) const {
  ops::AttentionWork work;
  ops::plan_attention(shape(how), host_layout(), work);

  const DeviceArray<int32_t> qo_indptr(qo_indptr_), kv_indptr(kv_indptr_), kv_indices(kv_indices_);
  const DeviceArray<int32_t> kv_len(kv_len_), tree_start(tree_start_), first_block(first_block_);
  const DeviceArray<uint64_t> paths(paths_), words(all_words());
  const DeviceArray<float> slopes(rules_.slopes), sinks(rules_.sinks), weights(all_weights());
  const DeviceArray<uint8_t> weighted(all_weighted());
  std::vector<int64_t> plane_starts;
  const DeviceArray<float> planes(all_planes(plane_starts)), first_logits(rules_.first_logits);
  std::vector<ops::SlotWeights> slot_weights;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const auto slots = static_cast<int64_t>(parts_[i].plane.size()) / heads_.kv_heads;
    slot_weights.push_back(
        {plane_starts[i] < 0 ? nullptr : planes.data() + plane_starts[i], slots});
  }
  const DeviceArray<ops::SlotWeights> slots_there(slot_weights);
  const DeviceArray<uint8_t> q(queries(0)), q_before(queries(1)), q_far(queries(2));
  const DeviceArray<uint8_t> unchunked(all_unchunked());
  const DeviceWork work_there(work, heads_.dims);
  const DeviceArray<uint8_t> out(q.size());
  const DeviceArray<float> lse(static_cast<size_t>(num_rows() * heads_.qo_heads()));

  ops::AttentionProblem p;
  p.q = {q.data(), heads_.q, heads_.dims, int64_t{heads_.qo_heads()} * heads_.dims, heads_.dims};
  p.k = keys_of(cache_.layer());
  p.v = values_of(cache_.layer());
  std::optional<DividedPages> keys, values;
  if (how.far) {
    keys.emplace(cache_.key_bytes(), p.k.page_stride).point(p.k);
    values.emplace(cache_.value_bytes(), p.v.page_stride).point(p.v);
  }
  p.num_qo_heads = heads_.qo_heads();
  p.num_kv_heads = heads_.kv_heads;
  p.batch = host_layout();
  p.batch.qo_indptr = qo_indptr.data();
  p.batch.kv_indptr = kv_indptr.data();
  p.batch.kv_indices = kv_indices.data();
  p.batch.kv_len = kv_len.data();
  p.batch.ancestors = paths.data();
  p.batch.tree_start = tree_start.data();
  p.batch.unchunked = unchunked.data();
  set_rules(p);
  p.chunk = rules_.chunk;
  p.q_before = p.q_far = p.q;
  p.q_before.data = q_before.data();
  p.q_far.data = q_far.data();
  if (!rules_.slopes.empty()) p.alibi_slopes = slopes.data();
  if (!rules_.sinks.empty()) p.sink_logits = sinks.data();
  work_there.point(p);
  p.own_sums = how.own_sums;
  p.visits.num_blocks = num_blocks_;
  p.visits.num_kv_heads = heads_.kv_heads;
  p.visits.list_words = list_words_;
  p.visits.words = words.data();
  p.visits.first_block = first_block.data();
  p.visits.log_weights = weights.data();
  p.visits.weighted = weighted.data();
  p.visits.weighs_blocks =
      std::ranges::any_of(parts_, [](const Part& part) { return !part.log_weights.empty(); });
  if (planes.size() > 0) p.weights = "counts";
  p.weighted = slots_there.data();
  if (!rules_.first_logits.empty()) p.first_logits = first_logits.data();
  p.out = out.data();
  p.out_stride = p.q.row_stride;
  p.lse = lse.data();
  ops::Operand operand;
  DeviceArray<uint8_t> operand_rows;
  if (how.operand) {
    operand = {*how.operand, num_rows(), p.q.row_stride, nullptr};
    operand_rows = DeviceArray<uint8_t>(static_cast<size_t>(num_rows() * operand.row_bytes()));
    operand.data = operand_rows.data();
    p.out_operand = operand;
  }
  run_on_gpu(p);
  work_there.check_counts();
  return {how.operand ? rows_of(operand_rows.values(), operand) : widened(out.values(), heads_.q),
          lse.values()};
}

}  // namespace effinfer
