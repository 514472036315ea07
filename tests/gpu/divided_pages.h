// Pages as attention finds them where some are encoded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gpu/device_arrays.h"
#include "ops/attention.h"

namespace effinfer {

// Pages of which the second half is in memory of its own, and NaN where it was.
class DividedPages {
 public:
  DividedPages(std::vector<uint8_t> pages, int64_t page_bytes) {
    first_ = static_cast<int32_t>(static_cast<int64_t>(pages.size()) / page_bytes / 2);
    const auto middle = pages.begin() + first_ * page_bytes;
    far_ = DeviceArray<uint8_t>(std::vector<uint8_t>(middle, pages.end()));
    std::fill(middle, pages.end(), uint8_t{0xff});
    near_ = DeviceArray<uint8_t>(pages);
  }
  void point(ops::KvRows& rows) const {
    rows.data = near_.data();
    rows.set_far(first_, far_.data());
  }

 private:
  int32_t first_ = 0;
  DeviceArray<uint8_t> near_, far_;
};

}  // namespace effinfer
