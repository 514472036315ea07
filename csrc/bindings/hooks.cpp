#include "effinfer/hooks.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/held.h"
#include "bindings/hooks.h"
#include "bindings/module.h"
#include "effinfer/residency.h"

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
        most_slots_(py::hasattr(part, "most_slots") ? part.attr("most_slots").cast<int64_t>() : 0),
        part_(part) {}
  Triggers triggers() const override { return triggers_; }
  std::string_view technique() const override { return technique_; }
  int64_t most_slots() const override { return most_slots_; }
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
  const int64_t most_slots_;
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

namespace {

constexpr const char* kRetain =
    "Keeps these slots of a group of layers without a window: one list for all heads, or one for "
    "each (layer of the group, KV head), strictly increasing, all of one length of at least 1. "
    "Throws InvalidArgumentError, and OutOfMemoryError where there is no page for a copy of a "
    "shared one, with nothing changed; so do evict(), merge() and reposition().";
constexpr const char* kReorder =
    "Slot i of each (layer of the group, KV head) becomes what slot slots[head][i] was: int32 "
    "[heads, slots], each row all slots once. Throws as retain().";
constexpr const char* kEvict =
    "Drops slots [begin, end), not all; later ones move up. Multiples of 64 of them cost least.";
constexpr const char* kMerge =
    "Makes key and value of slot `into` of a head (layer of the group * num_kv_heads + KV head) "
    "the sums of those of `slots`, times `weights`; drops none. slots: strictly increasing; "
    "weights: one for each, finite.";
constexpr const char* kReposition =
    "Rotates the keys from a slot on (one for each group, or one for all) by `delta` positions, "
    "and moves the next position by as many. Each rotation rounds to the type of the cache.";

constexpr const char* kKeys =
    "The keys of a head (layer of the group * num_kv_heads + KV head), rotated as they lie in the "
    "cache: float32 [slots, head_dim]. Throws InvalidArgumentError for a head that there is not; "
    "so does values().";
constexpr const char* kValues = "The values of a head: float32 [slots, head_dim].";

constexpr const char* kTokens =
    "The last `count` tokens of the prompt and the output that were computed, all where there are "
    "no more; those whose slots were dropped are among them.";
constexpr const char* kMergeSlots =
    "Of each (layer without a window, KV head) slot i goes into slot into[head][i], an array of "
    "int32 [heads, slots]; those that go into themselves stay, as many in each head. Keys and "
    "values become means of what goes into a slot, by how often it counts: e to the power of plane "
    "`weights`, whose numbers become those of the sums. Throws InvalidArgumentError for another "
    "array, and what plane(), merge() and retain() throw.";

constexpr const char* kPlane =
    "A copy of the numbers of its slots that have this name, float32 [layers without a window * "
    "num_kv_heads, slots]: those of a technique that sums what keys get of attention (a graph's "
    "attention_mass). Of several groups of such layers there are as many slots as the longest has; "
    "behind those of a shorter one are zeros. Throws InvalidArgumentError for a name that it "
    "lacks.";
constexpr const char* kSetPlane =
    "Sets the numbers of its slots that have this name, an array as plane() gives. New slots have "
    "0. Throws InvalidArgumentError for another shape, and what plane() throws.";
constexpr const char* kKeepTop =
    "Keeps of each (layer without a window, KV head) the `count` slots that have most in a "
    "plane, of equal ones the earlier, among them the sequence's `first` and `last` ones; all "
    "where there are no more. pool, pooling: a slot counts as much as the greatest (\"max\") or "
    "the average (\"avg\") of so many around it. group: whose heads choose, of those without a "
    "window; -1: all of them do. Throws what plane() and retain() throw.";

// Keys, or else values.
py::array_t<float> rows_of(const SequenceState& state, int32_t group, int32_t head, bool keys) {
  const bool is_known = group >= 0 && group < state.num_groups();
  const int64_t slots = is_known ? state.slots(group) : 0;  // read() throws for others
  py::array_t<float> rows({slots, int64_t{state.head_dim()}});
  const std::span<float> all(rows.mutable_data(), static_cast<size_t>(rows.size()));
  state.read(group, head, keys ? all : std::span<float>(), keys ? std::span<float>() : all);
  return rows;
}

bool is_maximum(const std::string& pooling) {
  if (pooling == "max" || pooling == "avg") return pooling == "max";
  throw InvalidArgument("[keep_top] pooling: expected \"max\" or \"avg\", got \"" + pooling + "\"");
}

using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;
using SlotArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

// One for each head.
std::vector<std::vector<int32_t>> lists_of(const SlotArray& slots, const std::string& argument) {
  if (slots.ndim() != 2) throw InvalidArgument(argument + ": expected int32 [heads, slots]");
  std::vector<std::vector<int32_t>> lists;
  for (py::ssize_t head = 0; head < slots.shape(0); ++head) {
    lists.emplace_back(slots.data(head), slots.data(head) + slots.shape(1));
  }
  return lists;
}

// What a hook may do to a sequence, by the names and in the order of KvCache's.
void register_residency(py::class_<SequenceHandle, std::shared_ptr<SequenceHandle>>& sequence) {
  sequence
      .def_property_readonly(
          "next_position", [](const SequenceHandle& s) { return s.state().next_position(); },
          "Of the token that is computed next.")
      .def_property_readonly(
          "num_groups", [](const SequenceHandle& s) { return s.state().num_groups(); },
          "Of layers that keep the same tokens.")
      .def_property_readonly(
          "num_whole_groups", [](const SequenceHandle& s) { return s.state().num_whole_groups(); },
          "Of these the first ones, which are without a window: one, but where a technique's facts "
          "ask for more (\"layer_groups\").")
      .def_property_readonly(
          "num_heads", [](const SequenceHandle& s) { return s.state().num_heads(); },
          "Of the groups without a window: their layers times num_kv_heads.")
      .def(
          "slots", [](const SequenceHandle& s, int32_t group) { return s.state().slots(group); },
          py::arg("group"), "Of a group. Throws InvalidArgumentError for one that is not there.")
      .def(
          "first_head",
          [](const SequenceHandle& s, int32_t group) { return s.state().first_head(group); },
          py::arg("group"),
          "Of the heads of planes those before a group without a window; of num_whole_groups: "
          "all. Throws InvalidArgumentError for another group.")
      .def(
          "retain",
          [](const SequenceHandle& s, const std::vector<std::vector<int32_t>>& slots,
             int32_t group) { s.state().retain(group, slots); },
          py::arg("slots"), py::arg("group") = 0, kRetain)
      .def(
          "reorder",
          [](const SequenceHandle& s, const SlotArray& slots, int32_t group) {
            s.state().reorder(group, lists_of(slots, "[reorder] slots"));
          },
          py::arg("slots"), py::arg("group") = 0, kReorder)
      .def(
          "evict",
          [](const SequenceHandle& s, int64_t begin, int64_t end, int32_t group) {
            s.state().evict(group, begin, end);
          },
          py::arg("begin"), py::arg("end"), py::arg("group") = 0, kEvict)
      .def(
          "merge",
          [](const SequenceHandle& s, int32_t head, int32_t into, std::vector<int32_t> slots,
             std::vector<float> weights, int32_t group) {
            const KvMerge merge = {head, into, std::move(slots), std::move(weights)};
            s.state().merge(group, {&merge, 1});
          },
          py::arg("head"), py::arg("into"), py::arg("slots"), py::arg("weights"),
          py::arg("group") = 0, kMerge)
      .def(
          "reposition",
          [](const SequenceHandle& s, const std::vector<int64_t>& from, int64_t delta) {
            s.state().reposition(from, delta);
          },
          py::arg("from_slots"), py::arg("delta"), kReposition)
      .def(
          "merge_slots",
          [](const SequenceHandle& s, const SlotArray& into, const std::string& weights) {
            merge_slots(s.state(), lists_of(into, "[merge_slots] into"), weights);
          },
          py::arg("into"), py::arg("weights"), kMergeSlots)
      .def(
          "keep_top",
          [](const SequenceHandle& s, const std::string& plane, int64_t count, int64_t first,
             int64_t last, int32_t pool, const std::string& pooling, int32_t group) {
            keep_top(s.state(), {plane, count, first, last, pool, is_maximum(pooling), group});
          },
          py::arg("plane"), py::arg("count"), py::arg("first") = 0, py::arg("last") = 0,
          py::arg("pool") = 1, py::arg("pooling") = "max", py::arg("group") = -1, kKeepTop);
}

// What a hook may read, and the numbers that it may set.
void register_rows(py::class_<SequenceHandle, std::shared_ptr<SequenceHandle>>& sequence) {
  sequence
      .def(
          "tokens",
          [](const SequenceHandle& s, size_t count) {
            const auto all = s.state().tokens();
            const auto last = all.last(std::min(count, all.size()));
            return std::vector<int32_t>(last.begin(), last.end());
          },
          py::arg("count"), kTokens)
      .def(
          "keys",
          [](const SequenceHandle& s, int32_t head, int32_t group) {
            return rows_of(s.state(), group, head, true);
          },
          py::arg("head"), py::arg("group") = 0, kKeys)
      .def(
          "values",
          [](const SequenceHandle& s, int32_t head, int32_t group) {
            return rows_of(s.state(), group, head, false);
          },
          py::arg("head"), py::arg("group") = 0, kValues)
      .def(
          "plane",
          [](const SequenceHandle& s, const std::string& name) {
            const SlotPlane plane = s.state().plane(name);
            py::array_t<float> copy({plane.num_heads, plane.num_slots});
            for (int64_t head = 0; head < plane.num_heads; ++head) {
              std::copy_n(plane.values + head * plane.stride, plane.num_slots,
                          copy.mutable_data(head));
            }
            return copy;
          },
          py::arg("name"), kPlane)
      .def(
          "set_plane",
          [](const SequenceHandle& s, const std::string& name, const FloatArray& values) {
            const SlotPlane plane = s.state().plane(name);
            if (values.ndim() != 2 || values.shape(0) != plane.num_heads ||
                values.shape(1) != plane.num_slots) {
              throw InvalidArgument("[set_plane] values: expected float32 [" +
                                    std::to_string(plane.num_heads) + ", " +
                                    std::to_string(plane.num_slots) + "]");
            }
            for (int64_t head = 0; head < plane.num_heads; ++head) {
              std::copy_n(values.data(head), plane.num_slots, plane.values + head * plane.stride);
            }
          },
          py::arg("name"), py::arg("values"), kSetPlane);
}

constexpr const char* kKeepRecent =
    "A hook that keeps the first `sinks` slots and the last `recent` ones, and drops the others "
    "`stride` at a time (StreamingLLM, arXiv:2309.17453). reposition: whether keys move to the "
    "positions that their slots have, so that the text may be of any length. technique: that "
    "requests name to have it; empty: it is for all. Throws InvalidArgumentError for sinks below "
    "0, stride below 1 and recent below stride.";

constexpr const char* kKeepTopHook =
    "A hook that keeps the slots that have most in a plane, as SequenceState.keep_top() does: at "
    "the prompt's end, or with a stride whenever there are more than `count`, so many at a time. "
    "technique: that requests name to have it; empty: it is for all. Throws InvalidArgumentError "
    "for count below first + last + stride, and other wrong values.";

}  // namespace

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
  py::class_<SequenceHandle, std::shared_ptr<SequenceHandle>> sequence(
      m, "SequenceState", "One sequence between two steps; good while a hook runs.");
  sequence.def_property_readonly("id", [](const SequenceHandle& s) { return s.state().id(); })
      .def_property_readonly(
          "length", [](const SequenceHandle& s) { return s.state().length(); },
          "Slots whose keys and values are written.")
      .def_property_readonly("prompt_tokens",
                             [](const SequenceHandle& s) { return s.state().prompt_tokens(); })
      .def_property_readonly(
          "output_tokens", [](const SequenceHandle& s) { return s.state().output_tokens(); },
          "Generated, the last of which has no slot yet.");
  register_residency(sequence);
  register_rows(sequence);
  py::class_<StepHook, std::shared_ptr<StepHook>>(m, "StepHook",
                                                  "A hook of the core, which runs without Python.")
      .def_property_readonly("technique",
                             [](const StepHook& hook) { return std::string(hook.technique()); });
  m.def(
      "keep_recent",
      [](int64_t sinks, int64_t recent, int64_t stride, bool reposition, std::string technique) {
        return keep_recent({sinks, recent, stride, reposition, std::move(technique)});
      },
      py::kw_only(), py::arg("sinks") = 4, py::arg("recent") = 1020, py::arg("stride") = 64,
      py::arg("reposition") = true, py::arg("technique") = "", kKeepRecent);
  m.def(
      "keep_top",
      [](const std::string& plane, int64_t count, int64_t first, int64_t last, int32_t pool,
         const std::string& pooling, int64_t stride, const std::string& technique) {
        return keep_top_hook(
            {{plane, count, first, last, pool, is_maximum(pooling)}, stride, technique});
      },
      py::kw_only(), py::arg("plane"), py::arg("count"), py::arg("first") = 0, py::arg("last") = 0,
      py::arg("pool") = 1, py::arg("pooling") = "max", py::arg("stride") = 0,
      py::arg("technique") = "", kKeepTopHook);
}

}  // namespace effinfer::bindings
