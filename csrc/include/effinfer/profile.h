// Where the time of a step goes: one record a kernel call and thread, summed by kernel, and as a
// trace that Perfetto and chrome://tracing open. Of a GPU: one record a call, timed by the device,
// which is one "thread" that never waits. Its steps are launched call by call while they are
// recorded, never replayed, and waited for.
//
//   engine.start_profile(200);
//   ... engine.step() ...
//   const Profile profile = engine.take_profile();
//   for (const KernelSummary& row : summarize(profile, Phase::decode).kernels) ...
//   std::ofstream("trace.json") << trace_json(profile);
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "effinfer/device.h"
#include "effinfer/export.h"
#include "effinfer/threads.h"

namespace effinfer {

// What kind of rows a step holds; it chooses the arithmetic of the matmuls, never the row count, so
// that a row's result does not depend on who shares the step.
enum class Phase : uint8_t { decode, prefill };

// A kernel call of a compiled step: what is known before it runs.
struct CallInfo {
  std::string node;        // "%q, %k, %v = matmul"
  std::string kernel;      // "matmul.avx512.int8"
  std::string what;        // the same in all layers: "blk.attn_q+attn_k+attn_v 576x960 q4_1"
  std::string shapes;      // the problem, at the largest step
  std::string arithmetic;  // of its products: "int8", "bf16" or "f32"
  Isa isa = Isa::portable;
};

// One thread in one call, in nanoseconds of std::chrono::steady_clock. The thread works from
// `begin_ns` to `done_ns` and waits for the others until `end_ns`, when the next call begins.
struct CallTimes {
  int64_t begin_ns = 0;
  int64_t done_ns = 0;
  int64_t end_ns = 0;
};

struct CallRecord {
  int32_t info = 0;   // index into Profile::calls
  int64_t bytes = 0;  // that must be moved: weights as packed, activations and KV, each once
  int64_t ops = 0;    // of the inner loops; a multiply-add is two
};

struct StepRecord {
  Phase phase = Phase::decode;
  int64_t tokens = 0;
  int64_t sequences = 0;
  int64_t begin_ns = 0;  // Executable::run() is entered; up to the first call it checks and plans
  int64_t end_ns = 0;
  int64_t barriers = 0;
  bool cancelled = false;         // calls that did not run begin and end with the step's end
  std::vector<CallRecord> calls;  // in the order of execution
  std::vector<CallTimes> times;   // [threads][calls]

  const CallTimes& time(int thread, size_t call) const {
    return times[static_cast<size_t>(thread) * calls.size() + call];
  }
};

struct Profile {
  std::string device = "cpu";  // or "cuda:0"
  int threads = 0;             // 1 of a GPU
  int32_t num_layers = 0;
  std::vector<CallInfo> calls;
  std::vector<StepRecord> steps;
  int64_t dropped_steps = 0;  // ran after the memory for records was used up
};

// Of a part of the machine that works beside another: a draft model's, beside the target's.
struct NamedProfile {
  std::string name;  // "draft_model on cpu:1"
  Profile profile;
};

// The share of the time of `work`'s steps, 0 to 1, in which a step of `beside` ran, too; 0 where
// there are no steps.
EFFINFER_API double overlapped_share(const Profile& work, const Profile& beside);

// The calls of one kernel on one kind of weights, over all steps of a phase.
struct KernelSummary {
  CallInfo info;  // of the first such call
  int64_t calls = 0;
  int64_t time_ns = 0;     // of thread 0, its barriers included
  int64_t threads_ns = 0;  // the same of all threads
  int64_t wait_ns = 0;     // of that, waiting at those barriers
  // Summed over the calls of a step: the least time of each over all steps, a mean over threads.
  // Close to what a step takes that no other program disturbs.
  int64_t least_ns = 0;
  int64_t bytes = 0;
  int64_t ops = 0;
};

struct PhaseSummary {
  int64_t steps = 0;
  int64_t tokens = 0;
  int64_t barriers = 0;
  int64_t step_ns = 0;     // sum over steps, from entering run() to its end
  int64_t host_ns = 0;     // of that, outside all calls: checks, planning, waking the threads
  int64_t between_ns = 0;  // from the end of a step to the next of the phase: sampler, scheduler
  int64_t between_count = 0;
  std::vector<KernelSummary> kernels;  // the longest first
};

// Without the steps that were cancelled.
EFFINFER_API PhaseSummary summarize(const Profile& profile, Phase phase);

// Chrome's trace-event format as JSON: a track for each thread; on each, the calls of a step and
// the waits after them; on the first, the steps around them.
EFFINFER_API std::string trace_json(const Profile& profile);
// The same of several at once, a process each, on one axis of time.
EFFINFER_API std::string trace_json(std::span<const NamedProfile> profiles);

// The best rate in bytes a second at which the pool's threads read memory together, for a
// millisecond at a time, from a buffer much larger than the caches, on huge pages where the system
// gives them. Takes a fraction of a second on an idle machine. Throws OutOfMemory.
EFFINFER_API double measure_read_bandwidth(ThreadPool& pool);

// The operations a second (a multiply-add is two) that the pool's threads do together in registers
// with the instructions that kernels of level `isa` use; `arithmetic` as in CallInfo. 0 where there
// is no such loop: portable code, and AMX tiles. Throws InvalidArgument for an unknown arithmetic.
EFFINFER_API double measure_peak_ops(ThreadPool& pool, std::string_view arithmetic, Isa isa);

}  // namespace effinfer
