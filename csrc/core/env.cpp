#include "core/env.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "effinfer/error.h"

namespace effinfer::env {
namespace {

std::optional<std::string> read(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

}  // namespace

std::optional<std::string> isa() {
  return read("EFFINFER_ISA");
}

std::optional<int> threads() {
  const std::optional<std::string> text = read("EFFINFER_THREADS");
  if (!text) return std::nullopt;
  int value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || stop != end || value < 1 || value > 1024) {
    throw InvalidArgument("[env] EFFINFER_THREADS: expected an integer in 1..1024, got \"" + *text +
                          "\"");
  }
  return value;
}

std::set<std::string> disabled_passes() {
  std::set<std::string> names;
  const std::optional<std::string> text = read("EFFINFER_PASSES");
  if (!text) return names;
  std::string_view rest = *text;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const std::string_view entry = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    if (entry.size() < 2 || entry.front() != '-') {
      throw InvalidArgument("[env] EFFINFER_PASSES: expected \"-pass,-pass\", got \"" + *text +
                            "\"");
    }
    names.emplace(entry.substr(1));
  }
  return names;
}

std::optional<std::string> tuning() {
  return read("EFFINFER_TUNING");
}

}  // namespace effinfer::env
