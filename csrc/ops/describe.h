// Parts of the texts that describe problems.
#pragma once

#include <string>
#include <string_view>

namespace effinfer::ops {

// " name=value"
inline std::string field(std::string_view name, int64_t value) {
  return std::string(" ").append(name).append("=").append(std::to_string(value));
}

}  // namespace effinfer::ops
