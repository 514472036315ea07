// Hooks that keep the slots whose scores are highest, for each KV head its own.
#include <algorithm>
#include <string>
#include <vector>

#include "effinfer/error.h"
#include "effinfer/ops/attention_scores.h"
#include "effinfer/residency.h"
#include "kv/top_slots.h"

namespace effinfer {
namespace {

void require(bool holds, const char* field, const std::string& expected, int64_t got) {
  if (holds) return;
  throw InvalidArgument(std::string("[keep_top] ") + field + ": expected " + expected + ", got " +
                        std::to_string(got));
}

std::string at_least(int64_t least, const char* what) {
  return "at least " + std::to_string(least) + " (" + what + ")";
}

void check(const SlotChoice& choice) {
  require(choice.first >= 0, "first", "at least 0", choice.first);
  require(choice.last >= 0, "last", "at least 0", choice.last);
  require(choice.count >= std::max<int64_t>(choice.first + choice.last, 1), "count",
          at_least(std::max<int64_t>(choice.first + choice.last, 1), "first and last"),
          choice.count);
  require(choice.pool >= 1 && choice.pool % 2 == 1, "pool", "an odd number of slots", choice.pool);
}

// The part of a plane that a group has.
SlotPlane part_of(const SlotPlane& plane, const SequenceState& sequence, int32_t group) {
  const int64_t first = sequence.first_head(group);
  return {plane.values + first * plane.stride, plane.stride, sequence.first_head(group + 1) - first,
          sequence.slots(group)};
}

// [heads][slots], each what the slots around it have.
std::vector<float> pooled(const SlotPlane& plane, const SlotChoice& choice) {
  std::vector<float> scores;
  for (int64_t head = 0; head < plane.num_heads; ++head) {
    const float* row = plane.values + head * plane.stride;
    scores.insert(scores.end(), row, row + plane.num_slots);
  }
  if (choice.pool == 1) return scores;
  ops::ScorePool options;
  options.pooling = choice.maximum ? ops::ScorePooling::max : ops::ScorePooling::avg;
  options.kernel_size = choice.pool;
  const auto length = static_cast<int32_t>(plane.num_slots);
  std::vector<float> out(scores.size());
  ThreadPool alone(1);
  ops::pool_scores({scores.data(), DType::f32, {plane.num_heads, plane.num_slots}},
                   {&length, DType::i32, {1}}, options, out.data(), alone);
  return out;
}

class TopHook final : public StepHook {
 public:
  explicit TopHook(const KeepTop& rule) : rule_(rule) {}

  std::string_view technique() const override { return rule_.technique; }
  Triggers triggers() const override {
    Triggers triggers;
    triggers.prompt_end = rule_.stride == 0;
    if (rule_.stride > 0) triggers.over_budget = rule_.choice.count;
    return triggers;
  }

  void run(const StepEvent&, SequenceState& sequence) override {
    SlotChoice choice = rule_.choice;
    const int64_t excess = sequence.length() - choice.count;
    if (excess <= 0) return;
    if (rule_.stride > 0) {
      const int64_t dropped = (excess + rule_.stride - 1) / rule_.stride * rule_.stride;
      choice.count = sequence.length() - dropped;
    }
    keep_top(sequence, choice);
  }

 private:
  const KeepTop rule_;
};

}  // namespace

void keep_top(SequenceState& sequence, const SlotChoice& choice) {
  check(choice);
  const int32_t groups = sequence.num_whole_groups();
  require(choice.group >= -1 && choice.group < groups, "group",
          "-1 (all) to " + std::to_string(groups - 1), choice.group);
  const int32_t end = choice.group < 0 ? groups : choice.group + 1;
  for (int32_t group = std::max(choice.group, 0); group < end; ++group) {
    const SlotPlane plane = part_of(sequence.plane(choice.plane), sequence, group);
    if (plane.num_slots <= choice.count) continue;
    const std::vector<float> scores = pooled(plane, choice);
    sequence.retain(group, kv::top_slots(scores, plane.num_heads, plane.num_slots, choice.count,
                                         {choice.first, choice.last}));
  }
}

std::shared_ptr<StepHook> keep_top_hook(const KeepTop& rule) {
  check(rule.choice);
  require(rule.stride >= 0, "stride", "at least 0", rule.stride);
  const int64_t least = rule.choice.first + rule.choice.last + rule.stride;
  require(rule.choice.count >= least, "count", at_least(least, "first, last and stride"),
          rule.choice.count);
  return std::make_shared<TopHook>(rule);
}

}  // namespace effinfer
