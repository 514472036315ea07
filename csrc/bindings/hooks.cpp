#include "effinfer/hooks.h"

#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "bindings/held.h"
#include "bindings/hooks.h"
#include "bindings/module.h"

namespace effinfer::bindings {
namespace {

// A sequence as a hook in Python sees it: what it keeps of it is refused behind its run().
class SequenceHandle {
 public:
  explicit SequenceHandle(SequenceState& state) : state_(&state) {}
  void close() { state_ = nullptr; }
  SequenceState& state() const {
    if (state_ != nullptr) return *state_;
    throw InvalidArgument("[hook] sequence: expected it to be used while the hook runs");
  }

 private:
  SequenceState* state_;
};

Triggers to_triggers(const py::object& part) {
  Triggers triggers;
  for (const auto& [key, value] : part.attr("triggers").cast<std::map<std::string, int64_t>>()) {
    if (key == "prompt_end") {
      triggers.prompt_end = value != 0;
    } else if (key == "page_filled") {
      triggers.page_filled = value != 0;
    } else if (key == "every") {
      triggers.every = value;
    } else if (key == "over_budget") {
      triggers.over_budget = value;
    } else {
      throw InvalidArgument("[hook] triggers: expected prompt_end, page_filled, every and " +
                            std::string("over_budget, got \"") + key + "\"");
    }
  }
  return triggers;
}

class PythonHook final : public StepHook {
 public:
  explicit PythonHook(const py::object& part)
      : technique_(part.attr("technique").cast<std::string>()),
        triggers_(to_triggers(part)),
        part_(part) {}
  Triggers triggers() const override { return triggers_; }
  std::string_view technique() const override { return technique_; }
  void run(const StepEvent& event, SequenceState& sequence) override {
    part_.with("run", [&](const py::object& run) {
      const auto handle = std::make_shared<SequenceHandle>(sequence);
      struct Closing {
        SequenceHandle& handle;
        ~Closing() { handle.close(); }
      } closing{*handle};
      run(event, handle);
    });
  }
  void forget(RequestId request) noexcept override {
    try {
      part_.with("forget", [&](const py::object& forget) { forget(request); });
    } catch (const std::exception&) {
      // A request that is gone can fail no more.
    }
  }

 private:
  const std::string technique_;
  const Triggers triggers_;
  const Held part_;
};

}  // namespace

StepHooks to_hooks(const py::object& parts) {
  StepHooks hooks;
  for (const py::handle& each : parts) {
    const auto part = py::reinterpret_borrow<py::object>(each);
    if (py::isinstance<StepHook>(part)) {
      hooks.push_back(part.cast<std::shared_ptr<StepHook>>());
      continue;
    }
    for (const char* name : {"technique", "triggers", "run"}) {
      if (py::hasattr(part, name)) continue;
      throw InvalidArgument(
          "[engine] hooks: expected technique, triggers and run(), got an object " +
          std::string("without ") + name);
    }
    hooks.push_back(std::make_shared<PythonHook>(part));
  }
  return hooks;
}

void register_hooks(py::module_& m) {
  py::class_<Triggers>(m, "Triggers", "Which triggers of a hook fired.")
      .def_readonly("prompt_end", &Triggers::prompt_end)
      .def_readonly("page_filled", &Triggers::page_filled)
      .def_readonly("every", &Triggers::every, "tokens; 0: it did not")
      .def_readonly("over_budget", &Triggers::over_budget, "slots; 0: it did not");
  py::class_<StepEvent>(m, "StepEvent", "What a step did to one sequence.")
      .def_readonly("request", &StepEvent::request)
      .def_readonly("fired", &StepEvent::fired)
      .def_readonly("first", &StepEvent::first, "the first of the step's slots")
      .def_readonly("count", &StepEvent::count, "how many there are");
  py::class_<SequenceHandle, std::shared_ptr<SequenceHandle>>(
      m, "SequenceState", "One sequence between two steps; good while a hook runs.")
      .def_property_readonly("id", [](const SequenceHandle& s) { return s.state().id(); })
      .def_property_readonly(
          "length", [](const SequenceHandle& s) { return s.state().length(); },
          "Slots whose keys and values are written.")
      .def_property_readonly("prompt_tokens",
                             [](const SequenceHandle& s) { return s.state().prompt_tokens(); })
      .def_property_readonly(
          "output_tokens", [](const SequenceHandle& s) { return s.state().output_tokens(); },
          "Generated, the last of which has no slot yet.");
  py::class_<StepHook, std::shared_ptr<StepHook>>(m, "StepHook",
                                                  "A hook of the core, which runs without Python.")
      .def_property_readonly("technique",
                             [](const StepHook& hook) { return std::string(hook.technique()); });
}

}  // namespace effinfer::bindings
