// The inside of an Executable.
#pragma once

#include <array>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "effinfer/compiler.h"
#include "executor/batch_check.h"
#include "executor/device_step.h"
#include "executor/program.h"
#include "executor/recorder.h"

namespace effinfer {

struct Executable::Impl {
  std::shared_ptr<const WeightSource> source;
  std::shared_ptr<ThreadPool> pool;
  executor::Shared shared;
  std::set<std::string> skipped;  // passes that did not run
  std::string isa;                // the level and why
  std::string tuning_trouble;     // why the tuning cache was of no use
  executor::BatchLimits limits;
  size_t arena_bytes = 0;
  std::shared_ptr<void> arena;
  size_t own_bytes = 0;       // of a member's own arena, 0: none
  std::shared_ptr<void> own;  // of all members

  // Of the graph's outputs behind the logits, in the arena.
  struct Output {
    const float* values = nullptr;
    Dim rows;
    int64_t cols = 0;
  };
  std::vector<std::string> output_names;
  std::vector<Output> outputs;  // by name
  int64_t last_tokens = 0;      // of the last step
  int64_t last_rows = 0;

  // One program when the phases share their arithmetic, else one each.
  std::vector<executor::Program> programs;
  std::array<size_t, 2> program_of_phase{};

  // By the slots of shapes; layers of one shape share them. Partial results take no memory before
  // they are written: few steps have as many as there is room for.
  std::vector<executor::AttentionBuffers> attention;
  std::vector<ops::VisitBuffers> visit_buffers;
  std::unique_ptr<float[]> partial_out;
  std::unique_ptr<float[]> partial_ms;
  std::unique_ptr<executor::DeviceStep> device;  // null: kernels run on the CPU

  // ops::TopList[members][max_rows], where the head can keep them; made by the step.
  std::unique_ptr<std::byte[]> top_lists;

  // These belong to the step that runs.
  std::vector<ops::VisitPlan> visits;
  std::vector<const executor::Call*> active;
  std::unique_ptr<executor::Recorder> recorder;  // null: no profile is being made

  // `first`: an executable whose weights and arenas may be used; null: there is none.
  static std::unique_ptr<Impl> build(const Graph& graph,
                                     std::shared_ptr<const WeightSource> weights,
                                     std::shared_ptr<ThreadPool> pool,
                                     const CompileOptions& options, const Impl* first);
  void allocate_arena(const Impl* first);
  void find_outputs();
  void lower();
  void reserve_plans();
  void plan_step(const ops::BatchLayout& layout, Phase phase);
  executor::Program& begin_step(const Batch& batch, KvCache& cache, executor::Step& step);
  // Of a GPU.
  void launch_step(const Batch& batch, KvCache& cache, int32_t top_k,
                   std::span<const RowDraw> draws);
  void run_step(const Batch& batch, KvCache& cache, executor::Step& step);
};

}  // namespace effinfer
