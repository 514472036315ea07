// The values that a kernel reads at the start of its call (effinfer/tuning.h has the rest), and
// their texts.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "effinfer/tuning.h"

namespace effinfer {

FetchDistance fetch_distance(WeightStream stream);
// Rows up to which packed lines are multiplied; `own` is what the kernel was written with.
int32_t line_rows(PackedTernary packed, int32_t own);

std::string to_string(FetchDistance distance);  // "8192/512"
// Nothing for other text and for values that the setters would refuse.
std::optional<FetchDistance> parse_fetch_distance(std::string_view text);
std::optional<int32_t> parse_panel_rows(std::string_view text);
// The one that is named so.
std::optional<WeightStream> parse_weight_stream(std::string_view text);
std::optional<PackedTernary> parse_packed_ternary(std::string_view text);

}  // namespace effinfer
