// What a step does: a page of policy, replaceable. The engine owns requests and pages; a policy
// only orders them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "effinfer/compiler.h"
#include "effinfer/engine.h"

namespace effinfer::runtime {

// What a policy sees of a request. Tokens still to feed are first those of the prompt, then those
// generated: one for a request that decodes, more for one that lost its pages and catches up.
struct ScheduledRequest {
  RequestId id = 0;  // ids grow: a lower one came earlier
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
};

struct SchedulerLimits {
  int64_t max_batch_tokens = 0;
  // Whether rows of prompts and generated tokens may share a step. They may not on the fast path,
  // where the phase chooses the arithmetic: a text would depend on who else is served.
  bool mixed_phases = false;
};

struct StepChunk {
  size_t request = 0;  // index into the running requests
  int64_t count = 0;   // tokens to feed
};

struct StepChoice {
  Phase phase = Phase::decode;
  std::vector<StepChunk> chunks;  // a request at most once; none: nothing to do
};

class SchedulerPolicy {
 public:
  virtual ~SchedulerPolicy() = default;
  // The request to admit next, an index into `waiting` (not empty, by id).
  virtual size_t admit(std::span<const ScheduledRequest> waiting) = 0;
  // Fills the empty `choice`: the tokens of the next step from `running` (not empty, by id).
  // Without mixed phases a chunk holds prompt tokens only, or generated tokens only, as the phase
  // says.
  virtual void choose(std::span<const ScheduledRequest> running, const SchedulerLimits& limits,
                      StepChoice& choice) = 0;
  // The request that gives its pages up, an index into `running` (not empty, by id).
  virtual size_t preempt(std::span<const ScheduledRequest> running) = 0;
};

// First come, first served; decodes go first in a mixed step, and take turns with prefill steps
// otherwise; the newest request is preempted, and catches up kCatchUpTokens a step.
inline constexpr int64_t kCatchUpTokens = 8;  // more rows delay those who are not to blame
std::unique_ptr<SchedulerPolicy> make_fcfs_policy();

}  // namespace effinfer::runtime
