// Sinks and a window of recent keys (StreamingLLM, arXiv:2309.17453).
#include <string>
#include <vector>

#include "effinfer/error.h"
#include "effinfer/residency.h"

namespace effinfer {
namespace {

class RecentHook final : public StepHook {
 public:
  explicit RecentHook(const KeepRecent& rule) : rule_(rule) {}

  std::string_view technique() const override { return rule_.technique; }
  Triggers triggers() const override {
    Triggers triggers;
    triggers.over_budget = rule_.sinks + rule_.recent;
    return triggers;
  }

  int64_t most_slots() const override { return rule_.reposition ? rule_.sinks + rule_.recent : 0; }

  void run(const StepEvent&, SequenceState& sequence) override {
    const int64_t excess = sequence.length() - rule_.sinks - rule_.recent;
    const int64_t count = (excess + rule_.stride - 1) / rule_.stride * rule_.stride;
    std::vector<int64_t> from(static_cast<size_t>(sequence.num_groups()), 0);
    for (int32_t group = 0; group < sequence.num_whole_groups(); ++group) {
      sequence.evict(group, rule_.sinks, rule_.sinks + count);
      from[static_cast<size_t>(group)] = rule_.sinks;
    }
    if (!rule_.reposition) return;
    sequence.reposition(from, -count);
  }

 private:
  const KeepRecent rule_;
};

void require(bool holds, const char* field, const std::string& expected, int64_t got) {
  if (holds) return;
  throw InvalidArgument(std::string("[keep_recent] ") + field + ": expected " + expected +
                        ", got " + std::to_string(got));
}

}  // namespace

std::shared_ptr<StepHook> keep_recent(const KeepRecent& rule) {
  require(rule.sinks >= 0, "sinks", "at least 0", rule.sinks);
  require(rule.stride >= 1, "stride", "at least 1", rule.stride);
  require(rule.recent >= rule.stride, "recent",
          "at least " + std::to_string(rule.stride) + " (stride)", rule.recent);
  return std::make_shared<RecentHook>(rule);
}

}  // namespace effinfer
