// Messages to the program's callback.
#pragma once

#include <string>

#include "effinfer/log.h"

namespace effinfer {

// Whether anybody hears messages of this level: what costs time to say is said only then.
bool logs(LogLevel level);

void log(LogLevel level, const std::string& text);

}  // namespace effinfer
