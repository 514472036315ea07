// What an AttentionPlan holds.
#pragma once

#include <memory>
#include <vector>

#include "effinfer/ops/attention.h"
#include "ops/attention.h"
#include "ops/device_plans.h"

namespace effinfer::ops {

inline constexpr int32_t kMaxHeadDim = 1024;

// A caller's lists of spans.
struct ListCopies {
  explicit ListCopies(const AttentionLists& given);
  ListCopies(const ListCopies&) = delete;

  std::vector<int32_t> lists;
  std::vector<int32_t> indptr;
  std::vector<int32_t> spans;
  std::vector<int64_t> span_masks;
  AttentionLists views;  // of these
};

struct AttentionPlan::Impl {
  // Checks all it is given, and copies the sequences. `lists` may be null.
  Impl(const AttentionGeometry& geometry, const AttentionSequences& sequences,
       const AttentionLists* lists = nullptr);

  int64_t num_sequences() const { return static_cast<int64_t>(kv_len.size()); }
  int64_t num_rows() const { return qo_indptr.back(); }
  AttentionShape shape() const {
    return {KeySource::rows, geometry.num_qo_heads, geometry.num_kv_heads, geometry.head_dim_vo,
            geometry.causal, geometry.window_left,  geometry.sink_tokens};
  }
  BatchLayout batch() const {
    BatchLayout layout;
    layout.num_tokens = num_rows();
    layout.num_sequences = num_sequences();
    layout.qo_indptr = qo_indptr.data();
    layout.kv_indptr = kv_indptr.data();
    if (paged) layout.kv_indices = kv_indices.data();
    layout.kv_len = kv_len.data();
    return layout;
  }

  PlanLists lists() const {
    return {batch(),           static_cast<int64_t>(kv_indices.size()), &mask, &mask_starts,
            &mask_row_strides, blocks ? &blocks->views : nullptr};
  }

  AttentionGeometry geometry;
  bool paged = false;
  bool has_mask = false;
  std::vector<int32_t> qo_indptr;
  std::vector<int32_t> kv_indptr;
  std::vector<int32_t> kv_indices;
  std::vector<int32_t> kv_len;
  std::vector<uint8_t> mask;
  std::vector<int64_t> mask_starts;       // [S + 1] bits; none with lists
  std::vector<int64_t> mask_row_strides;  // [S] bits
  int64_t num_kv_rows = 0;                // pages, or rows, that k and v have at least
  std::unique_ptr<ListCopies> blocks;     // null: all keys
  AttentionWork work;
  std::unique_ptr<DevicePlans> device_plans = std::make_unique<DevicePlans>();

 private:
  void copy_mask(const TensorView& view);
  // Where each sequence's bits start.
  void set_mask_starts(const TensorView& mask_indptr);
  void check_lists(const AttentionLists& lists);
  void check_list(int64_t index, const int32_t* list, std::vector<uint8_t>& covered) const;
  void check_spans(const AttentionLists& given, const int32_t* list, int32_t first,
                   int32_t last) const;
};

}  // namespace effinfer::ops
