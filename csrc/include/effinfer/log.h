// What the library tells while it works: how a model was loaded, what was measured, what fell back.
// Nothing is said until a program asks for it. Errors are exceptions and not messages.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "effinfer/export.h"

namespace effinfer {

enum class LogLevel : uint8_t { debug, info, warning };

// The text is one line, without an end of line, and a view that ends with the call.
using LogCallback = std::function<void(LogLevel level, std::string_view text)>;

// From now on messages of `least` and above go to `callback`, in whichever threads they arise,
// perhaps in several at once; an empty one silences them. It shall not wait for the library. What
// it throws is dropped.
EFFINFER_API void set_log_callback(LogCallback callback, LogLevel least = LogLevel::info);

}  // namespace effinfer
