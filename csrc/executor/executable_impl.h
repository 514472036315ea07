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

  // Of what the graph returns behind the logits, and, for the whole graph of one with a front, that
  // front.
  std::vector<std::string> output_names;
  int64_t last_tokens = 0;  // of the last step
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
  std::unique_ptr<float[]> kept_numbers;  // null: no program keeps any weights
  std::unique_ptr<float[]> kept_weights;
  std::unique_ptr<executor::DeviceStep> device;  // null: kernels run on the CPU

  // ops::TopList[members][max_rows], where the head can keep them; made by the step.
  std::unique_ptr<std::byte[]> top_lists;

  // These belong to the step that runs.
  std::vector<ops::BatchLayout> layouts;  // by group of the cache's layers, if there are several
  std::vector<ops::VisitPlan> visits;
  std::vector<ops::SlotWeights> weighted;
  std::vector<const executor::Call*> active;
  std::unique_ptr<executor::Recorder> recorder;  // null: no profile is being made

  std::shared_ptr<Executable> front;  // runs first; null: there is none
  std::string placement;              // which layers are where, and why; empty: nobody asked
  // Of the step that runs.
  std::vector<FloatInput> front_inputs;
  std::vector<FloatInput> own_inputs;

  // `first`: an executable whose weights and arenas may be used; null: there is none. `whole`: what
  // `graph` is a half of, null: nothing. Only a front has no logits.
  static std::unique_ptr<Impl> build(const Graph& graph,
                                     std::shared_ptr<const WeightSource> weights,
                                     std::shared_ptr<ThreadPool> pool,
                                     const CompileOptions& options, const Impl* first,
                                     const Graph* whole = nullptr, bool has_logits = true);
  void allocate_inputs(const Graph& graph);
  void allocate_arena(const Impl* first);
  void find_outputs();
  void lower();
  void reserve_plans();
  // The layouts of the cache's groups of layers.
  void lay_out(const Batch& batch, const KvCache& cache, executor::Step& step);
  void plan_step(const executor::Step& step, Phase phase);
  // How often keys count, by names and sequences.
  void set_weighted(executor::Step& step);
  const executor::AttentionBuffers* planned(const executor::Step& step, size_t slot) const;
  // Has attention keep scores, if this step's rows let it.
  void keep_weights(const executor::Program& program, executor::Step& step);
  void add_front_layers(KvCacheConfig& config) const;
  // The step behind the front, which has run, if there is one.
  Batch after_front(const Batch& batch, KvCache& cache, const CancelToken* cancel);
  executor::Program& begin_step(const Batch& batch, KvCache& cache, executor::Step& step);
  // Of a GPU.
  void launch_step(const Batch& batch, KvCache& cache, int32_t top_k,
                   std::span<const RowDraw> draws);
  // Throws Cancelled where not all calls ran.
  void run_step(const Batch& batch, KvCache& cache, executor::Step& step,
                const CancelToken* cancel);
};

}  // namespace effinfer
