// The inside of an Executable.
#pragma once

#include <array>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "compiler/batch_check.h"
#include "compiler/lowering.h"
#include "compiler/recorder.h"
#include "effinfer/compiler.h"

namespace effinfer {

struct Executable::Impl {
  std::shared_ptr<const WeightSource> source;
  std::shared_ptr<ThreadPool> pool;
  compiler::Shared shared;
  std::set<std::string> skipped;  // passes that did not run
  std::string isa;                // the level and why
  compiler::StepLimits limits;
  size_t arena_bytes = 0;
  std::shared_ptr<void> arena;
  size_t own_bytes = 0;       // of a member's own arena, 0: none
  std::shared_ptr<void> own;  // of all members

  // One program when the phases share their arithmetic, else one each.
  std::vector<compiler::Program> programs;
  std::array<size_t, 2> program_of_phase{};

  // Attention: buffers a slot; the partial results are shared, since layers run one by one, and
  // take no memory before they are written: few steps have as many as there is room for.
  struct PlanBuffers {
    std::vector<kernels::AttentionWorkItem> items;
    std::vector<kernels::AttentionMergeItem> merges;
    std::vector<int32_t> done;
  };
  std::vector<PlanBuffers> plan_buffers;
  std::vector<kernels::VisitBuffers> visit_buffers;  // shared by layers in the same way
  std::unique_ptr<float[]> partial_out;
  std::unique_ptr<float[]> partial_ms;

  // kernels::TopList[members][max_rows], where the head can keep them; made by the step.
  std::unique_ptr<std::byte[]> top_lists;

  // Of the step that runs.
  std::vector<kernels::AttentionPlan> plans;
  std::vector<kernels::VisitPlan> visits;
  std::vector<const compiler::Call*> active;
  std::unique_ptr<compiler::Recorder> recorder;  // null: no profile is being made

  void allocate_arena();
  void lower();
  void reserve_plans();
  void plan_step(const kernels::BatchLayout& layout);
  void run_step(const Batch& batch, KvCache& cache, compiler::Step& step);
};

}  // namespace effinfer
