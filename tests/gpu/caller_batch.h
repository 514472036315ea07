// Sequences over the pages of a caller, which lie in any order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "core/float16.h"
#include "gpu/device_arrays.h"
#include "ops/kv_layout.h"

namespace effinfer {

inline std::vector<uint16_t> as_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> out;
  for (const float x : values) out.push_back(f32_to_bf16(x));
  return out;
}

struct CallerBatch {
  CallerBatch(const std::vector<int32_t>& lengths, const std::vector<int32_t>& rows,
              int32_t page_size, std::mt19937& random)
      : kv_len(lengths) {
    for (size_t s = 0; s < kv_len.size(); ++s) {
      kv_indptr.push_back(kv_indptr.back() + (kv_len[s] + page_size - 1) / page_size);
      qo_indptr.push_back(qo_indptr.back() + rows[s]);
    }
    kv_indices.resize(static_cast<size_t>(kv_indptr.back()));
    std::iota(kv_indices.begin(), kv_indices.end(), 0);
    std::shuffle(kv_indices.begin(), kv_indices.end(), random);
  }

  int32_t num_rows() const { return qo_indptr.back(); }
  int32_t num_pages() const { return kv_indptr.back(); }

  ops::BatchLayout layout() const {
    ops::BatchLayout layout;
    layout.num_tokens = num_rows();
    layout.num_sequences = static_cast<int64_t>(kv_len.size());
    layout.qo_indptr = qo_indptr.data();
    layout.kv_indptr = kv_indptr.data();
    layout.kv_indices = kv_indices.data();
    layout.kv_len = kv_len.data();
    return layout;
  }

  std::vector<int32_t> kv_len, qo_indptr = {0}, kv_indptr = {0}, kv_indices;
};

// Its lists in the device's memory.
struct DeviceBatch {
  explicit DeviceBatch(const CallerBatch& batch)
      : rows(batch.qo_indptr),
        pages(batch.kv_indptr),
        indices(batch.kv_indices),
        lengths(batch.kv_len),
        layout(batch.layout()) {
    layout.qo_indptr = rows.data();
    layout.kv_indptr = pages.data();
    layout.kv_indices = indices.data();
    layout.kv_len = lengths.data();
  }

  DeviceArray<int32_t> rows, pages, indices, lengths;
  ops::BatchLayout layout;
};

}  // namespace effinfer
