// The distance that a kernel reads at the start of its call (effinfer/tuning.h has the rest).
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "effinfer/tuning.h"

namespace effinfer {

FetchDistance fetch_distance(WeightStream stream);
std::string to_string(FetchDistance distance);  // "8192/512"
// Nothing for other text and for distances that set_fetch_tuning() would refuse.
std::optional<FetchDistance> parse_fetch_distance(std::string_view text);

}  // namespace effinfer
