#include "runtime/scheduler.h"

#include <algorithm>

namespace effinfer::runtime {
namespace {

class FcfsPolicy : public SchedulerPolicy {
 public:
  size_t admit(std::span<const ScheduledRequest>) override { return 0; }
  size_t preempt(std::span<const ScheduledRequest> running) override { return running.size() - 1; }

  void choose(std::span<const ScheduledRequest> running, const SchedulerLimits& limits,
              StepChoice& choice) override {
    if (limits.mixed_phases) {
      mixed(running, limits.max_batch_tokens, choice);
    } else {
      one_phase(running, limits.max_batch_tokens, choice);
    }
  }

 private:
  static void mixed(std::span<const ScheduledRequest> running, int64_t budget, StepChoice& choice) {
    const auto take = [&](bool decoding) {
      for (size_t i = 0; i < running.size() && budget > 0; ++i) {
        const int64_t pending = running[i].prompt_tokens + running[i].generated_tokens;
        const bool decodes = running[i].prompt_tokens == 0 && pending == 1;
        if (pending == 0 || decodes != decoding) continue;
        choice.chunks.push_back({i, std::min(pending, budget)});
        budget -= choice.chunks.back().count;
        if (!decodes) choice.phase = Phase::prefill;
      }
    };
    take(true);
    take(false);
  }

  void one_phase(std::span<const ScheduledRequest> running, int64_t budget, StepChoice& choice) {
    const auto prefills = [](const ScheduledRequest& r) { return r.prompt_tokens > 0; };
    const bool any_prefill = std::any_of(running.begin(), running.end(), prefills);
    const bool any_decode = !std::all_of(running.begin(), running.end(), prefills);
    // Phases take turns: a prompt waits for one decode step at most, a decode for one prefill step.
    if (any_prefill && !(any_decode && last_phase_ == Phase::prefill)) {
      choice.phase = Phase::prefill;
    }
    last_phase_ = choice.phase;
    for (size_t i = 0; i < running.size() && budget > 0; ++i) {
      if (prefills(running[i]) != (choice.phase == Phase::prefill)) continue;
      const int64_t wanted = choice.phase == Phase::prefill
                                 ? running[i].prompt_tokens
                                 : std::min(running[i].generated_tokens, kCatchUpTokens);
      choice.chunks.push_back({i, std::min(wanted, budget)});
      budget -= choice.chunks.back().count;
    }
  }

  Phase last_phase_ = Phase::decode;
};

}  // namespace

std::unique_ptr<SchedulerPolicy> make_fcfs_policy() {
  return std::make_unique<FcfsPolicy>();
}

}  // namespace effinfer::runtime
