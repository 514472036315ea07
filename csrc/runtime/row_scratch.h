// The memory in which the runtime narrows one row of logits, and what it does with a row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>

#include "cpu/level.h"
#include "cpu/row_distribution.h"
#include "effinfer/device.h"
#include "effinfer/error.h"

namespace effinfer::runtime {

// Grows to the longest row; pages that no row needed are never touched.
class RowScratch {
 public:
  explicit RowScratch(Isa isa) : isa_(isa) {}

  cpu::RowDistribution row(size_t vocab) {
    const auto size = static_cast<int64_t>(vocab);
    const size_t bytes = cpu::RowDistribution::scratch_bytes(size) + kAlignment;
    if (bytes > bytes_) {
      memory_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
      bytes_ = bytes;
    }
    void* place = memory_.get();
    size_t space = bytes_;
    std::align(kAlignment, bytes - kAlignment, place, space);
    return {cpu::kernels_at<cpu::RowMath>(isa_), place, size};
  }

 private:
  static constexpr size_t kAlignment = 64;
  Isa isa_;
  std::unique_ptr<std::byte[]> memory_;
  size_t bytes_ = 0;
};

// Rows of logits that are held at a time to score a text: enough for the panels of prefill,
// whatever the vocabulary (64 rows of 262k, 512 of 32k).
inline int64_t slice_rows(int64_t vocab) {
  constexpr int64_t kSliceBytes = int64_t{64} << 20;
  return std::max<int64_t>(kSliceBytes / (vocab * static_cast<int64_t>(sizeof(float))), 1);
}

// What sampling refuses of a row: a NaN among its logits, or a highest one that is not finite.
[[noreturn]] inline void refuse_logits(float highest) {
  if (std::isnan(highest)) throw InvalidArgument("[sampling] logits: expected numbers, got NaN");
  throw InvalidArgument("[sampling] logits: expected a finite maximum, got " +
                        std::to_string(highest));
}

// Starts with logits that the filter of `top_k` (0: none) may follow. Throws InvalidArgument for a
// NaN, +infinity, or nothing above -infinity.
inline void start(cpu::RowDistribution& row, std::span<const float> logits, int64_t top_k) {
  using ops::RowStatus;
  const RowStatus status =
      row.from_logits(logits.data(), DType::f32, static_cast<int64_t>(logits.size()), top_k);
  if (status == RowStatus::nan) refuse_logits(std::numeric_limits<float>::quiet_NaN());
  if (row.check_logits() != RowStatus::ok) refuse_logits(row.max());
}

// log(sum(exp(logits))); throws as start().
inline double log_sum_exp(cpu::RowDistribution& row, std::span<const float> logits) {
  start(row, logits, 0);
  const auto max = static_cast<double>(row.max());
  row.to_weights(1.0f);
  return max + std::log(row.total());
}

}  // namespace effinfer::runtime
