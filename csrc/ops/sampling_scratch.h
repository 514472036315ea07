// What the kernels of a GPU that draw from rows (ops/row_sampling.h) hand to each other, of each
// row, whose parts are the work of a block each:
//
//   state     what is known of the row, and counts of its blocks
//   extents   of each part: its highest and lowest value
//   maxima    of each part's groups of kGroup values
//   warps     of each part's warps: sums of weights, listed values
//   bins      of the row: how many values have a weight in each, and where in it they lie
//   list      values in a range and their tokens
#pragma once

#include <cstdint>

namespace effinfer::ops {

// How a row is shared among blocks follows from its length alone, so that sums have the same order
// in every batch.
struct SamplingScratch {
  static constexpr int32_t kPart = 8192;
  static constexpr int32_t kGroup = 128;
  static constexpr int32_t kWarps = 16;  // of a part
  static constexpr int32_t kBins = 1024;
  static constexpr int32_t kListed = 4096;
  static constexpr int32_t kMostParts = 64;

  static constexpr int64_t kStateBytes = 64;
  static constexpr int64_t kExtentBytes = 8;
  static constexpr int64_t kWarpBytes = 24;

  int32_t parts = 0;  // 0: rows are too short or too long, and a block's each

  static constexpr SamplingScratch of(int64_t vocab) {
    const int64_t parts = (vocab + kPart - 1) / kPart;
    return {parts > 1 && parts <= kMostParts ? static_cast<int32_t>(parts) : 0};
  }
  // Of a row.
  constexpr int64_t bytes() const {
    if (parts == 0) return 0;
    return kStateBytes + parts * (kExtentBytes + kPart / kGroup * 4 + kWarps * kWarpBytes) +
           kBins * 8 + kListed * 8;
  }
};

}  // namespace effinfer::ops
