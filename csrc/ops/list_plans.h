// What an AttentionPlan holds.
#pragma once

#include <vector>

#include "effinfer/ops/list_attention.h"
#include "ops/list_attention.h"

namespace effinfer::ops {

inline constexpr int32_t kMaxHeadDim = 1024;

struct AttentionPlan::Impl {
  // Checks and copies the sequences.
  Impl(const AttentionGeometry& geometry, const AttentionSequences& sequences);

  std::vector<int64_t> mask_starts(const TensorView& mask_indptr) const;
  void check_lists(const AttentionLists& lists);

  int64_t num_sequences() const { return static_cast<int64_t>(kv_len.size()); }
  int64_t num_rows() const { return qo_indptr.back(); }
  ListShape shape() const {
    return {geometry.num_qo_heads, geometry.num_kv_heads, geometry.causal, geometry.window_left};
  }
  SequenceRows rows() const { return {num_sequences(), qo_indptr.data(), kv_len.data(), nullptr}; }

  AttentionGeometry geometry;
  bool paged = false;
  bool has_mask = false;
  std::vector<int32_t> qo_indptr;
  std::vector<int32_t> kv_indptr;
  std::vector<int32_t> kv_indices;
  std::vector<int32_t> kv_len;
  std::vector<uint8_t> mask;
  std::vector<int64_t> mask_row_strides;  // [S] bits
  int64_t num_kv_rows = 0;                // pages, or rows, that k and v have at least
  ListPlan plan;

 private:
  void copy_mask(const TensorView& view);
  void check_list(int64_t index, const int32_t* list, std::vector<uint8_t>& covered) const;
  void check_spans(const AttentionLists& given, const int32_t* list, int32_t first,
                   int32_t last) const;
};

}  // namespace effinfer::ops
