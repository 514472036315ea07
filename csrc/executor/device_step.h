// A step on a device other than the CPU: what the host knows of it goes there in one block, kernels
// follow each other in a queue, and the logits come back.
//
// A decoding step is a recording that is replayed: its sizes are rounded up, so that many steps
// share one, and all that differs between them is in the block, whose arrays lie where they lay.
// Rows that the rounding adds are of no sequence; what is computed of them nobody reads.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/backend.h"
#include "executor/batch_check.h"
#include "executor/device_lists.h"
#include "executor/device_weights.h"
#include "executor/program.h"
#include "executor/recorder.h"
#include "executor/recordings.h"
#include "executor/step.h"
#include "executor/step_coding.h"
#include "executor/step_packer.h"
#include "ops/registry.h"
#include "ops/row_sampling.h"
#include "ops/top_rows.h"

namespace effinfer::executor {

class DeviceStep {
 public:
  // Takes the memory that steps within `limits` need. Throws OutOfMemory.
  DeviceStep(const Shared& shared, const BatchLimits& limits,
             std::span<const AttentionBuffers> attention, std::span<const ops::VisitPlan> visits,
             size_t partials, size_t partial_floats, size_t arranged_bytes);

  // Puts the calls of a step whose pointers are the host's into the queue, and with top_k > 0 those
  // that find as many highest logits of each row, or with draws, one a row, that draw tokens.
  void launch(const Program& program, const Step& step, std::span<const AttentionBuffers> attention,
              int32_t top_k, std::span<const RowDraw> draws);
  // Likewise, and waits: each call, timed by the device, is in the recorder's next record.
  struct Timing {
    Recorder& recorder;
    size_t program;    // its number
    int64_t begin_ns;  // of the step
  };
  void launch_timed(const Program& program, const Step& step,
                    std::span<const AttentionBuffers> attention, int32_t top_k,
                    std::span<const RowDraw> draws, const Timing& timing);
  // To be called before it: returns what may follow a program's calls.
  std::vector<CallInfo> prepare_timing(std::span<const Program> programs);
  // These wait for the step that was launched, and write its logits [R, vocab], the highest of each
  // row, or tokens, to the host's memory. They throw DeviceError.
  void read(std::span<float> logits);
  void read_top(const TopLogits& top);
  void read_drawn(const DrawnTokens& drawn);
  // Of a step that has been read.
  void read_row(int64_t row, std::span<float> logits);
  // Whether there is a kernel that draws.
  bool draws() const { return draw_rows_ != nullptr; }

 private:
  void pack(const Step& step, std::span<const AttentionBuffers> attention,
            std::span<const RowDraw> draws, bool shared);
  void pack_visits(StepPacker& packer, const ops::VisitPlan& from, ops::VisitPlan& to,
                   bool shared) const;
  // Returns what takes the place of the step's pages.
  std::span<const int32_t> pack_coded(StepPacker& packer, std::span<const int32_t> pages,
                                      bool shared);
  void pack_draws(StepPacker& packer, std::span<const RowDraw> draws, size_t rows);
  void pack_attention(StepPacker& packer, std::span<const AttentionBuffers> all, size_t slot,
                      bool shared);
  // Tables of the cache's groups of layers but the first.
  void pack_groups(StepPacker& packer, const Batch& batch, size_t sequences);
  // The pages of all tables: those of all but the last one are rounded where steps share
  // recordings.
  void pack_pages(StepPacker& packer, const Batch& batch, bool shared);
  // pack(), rounded where steps share recordings; whether they do.
  bool pack_step(const Step& step, std::span<const AttentionBuffers> attention,
                 std::span<const RowDraw> draws);
  Recordings::Key key_of(const Program& program, int32_t top_k) const;
  int64_t batch_rows() const { return static_cast<int64_t>(batch_.logit_rows.size()); }
  // The step's float inputs to the device, and what the graph returns behind its logits back.
  void upload_inputs(const Batch& batch);
  // The step's scored rows to the device.
  void upload_scored(std::span<const ScoredRows> scored);
  void reserve_scored(size_t most);
  void download_outputs();
  // Values [rows, k], then tokens.
  ops::TopRowsProblem top_of(int32_t k) const;

  const Shared& shared_;
  BatchLimits limits_;
  std::unique_ptr<Queue> queue_;
  const ops::Variant<ops::TopRowsProblem>& top_rows_;
  const ops::Variant<ops::RowSamplingProblem>* draw_rows_;  // null: none
  size_t image_bytes_;
  std::shared_ptr<std::byte> image_;      // pinned
  std::shared_ptr<void> block_;           // the same on the device
  std::shared_ptr<std::byte> top_image_;  // pinned
  std::shared_ptr<void> top_;
  std::shared_ptr<void> logits_;
  std::shared_ptr<void> partial_out_;
  std::shared_ptr<void> partial_ms_;
  std::shared_ptr<void> done_;
  std::shared_ptr<void> arranged_;
  DeviceLists lists_;
  DeviceWeights weights_;
  StepCoding coding_;
  // Of scored rows, once there were some.
  size_t most_scored_ = 0;                   // that there is room for
  std::shared_ptr<std::byte> scored_image_;  // pinned
  std::shared_ptr<void> scored_block_;
  std::shared_ptr<void> mass_sums_;
  Recordings recordings_;
  std::unique_ptr<Marks> marks_;  // null: nothing was timed

  // Of the step, without what rounding adds.
  int64_t num_tokens_ = 0;
  int64_t num_rows_ = 0;
  std::vector<ScoredRows> scored_;  // ordered by names
  // With the device's pointers.
  Batch batch_;
  std::vector<AttentionBuffers> attention_;
  std::vector<ops::VisitPlan> visits_;
  std::vector<ops::BatchLayout> groups_;  // none: there is one
  Step step_;
  ops::RowSamplingProblem drawn_;
  std::shared_ptr<void> draw_scratch_;
};

}  // namespace effinfer::executor
