// A step on a device other than the CPU: what the host knows of it goes there in one block, kernels
// follow each other in a queue, and the logits come back.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/backend.h"
#include "executor/batch_check.h"
#include "executor/program.h"
#include "executor/step.h"
#include "ops/registry.h"
#include "ops/top_rows.h"

namespace effinfer::executor {

class DeviceStep {
 public:
  // Takes the memory that steps within `limits` need. Throws OutOfMemory.
  DeviceStep(const Shared& shared, const BatchLimits& limits,
             std::span<const AttentionBuffers> attention, size_t partials, size_t partial_floats);

  // Puts the calls of a step whose pointers are the host's into the queue.
  void launch(const Program& program, const Step& step,
              std::span<const AttentionBuffers> attention);
  // These wait for the step that was launched, and write its logits [R, vocab], or the highest of
  // each of `rows` rows, to the host's memory. They throw DeviceError.
  void read(std::span<float> logits);
  void read_top(int64_t rows, const TopLogits& top);

 private:
  // Arrays one after the other, aligned.
  class Packer;
  void pack(const Step& step, std::span<const AttentionBuffers> attention);

  std::unique_ptr<Queue> queue_;
  const ops::Variant<ops::TopRowsProblem>& top_rows_;
  std::vector<std::byte> image_;  // on the host
  std::shared_ptr<void> block_;   // the same on the device
  std::shared_ptr<void> logits_;
  std::shared_ptr<void> top_;  // values and tokens [rows, k]
  int64_t max_rows_;
  int64_t vocab_size_;
  std::shared_ptr<void> partial_out_;
  std::shared_ptr<void> partial_ms_;
  std::shared_ptr<void> done_;

  // With the device's pointers.
  Batch batch_;
  std::vector<AttentionBuffers> attention_;
  Step step_;
};

}  // namespace effinfer::executor
