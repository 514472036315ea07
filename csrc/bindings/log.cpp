#include "effinfer/log.h"

#include <array>
#include <memory>
#include <string>

#include "bindings/held.h"
#include "bindings/module.h"
#include "bindings/strings.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

constexpr std::array<const char*, 3> kLevels = {"debug", "info", "warning"};

LogLevel level_of(const std::string& name) {
  for (size_t i = 0; i < kLevels.size(); ++i) {
    if (name == kLevels[i]) return static_cast<LogLevel>(i);
  }
  throw InvalidArgument("[log] least: expected debug, info or warning, got " + name);
}

void set_callback(const py::object& callback, const std::string& least) {
  const LogLevel level = level_of(least);
  if (callback.is_none()) {
    set_log_callback(nullptr, level);
    return;
  }
  const auto held = std::make_shared<const Held>(callback);
  set_log_callback(
      [held](LogLevel of, std::string_view text) {
        held->with("__call__", [&](const py::object& call) {
          call(kLevels[static_cast<size_t>(of)], to_python(text));
        });
      },
      level);
}

}  // namespace

void register_log(py::module_& m) {
  m.def("set_log_callback", &set_callback, py::arg("callback").none(true), py::arg("least"),
        "Calls callback(level, text) with what the core tells, in whichever thread it does; None "
        "silences it. Levels: debug, info, warning.");
}

}  // namespace effinfer::bindings
