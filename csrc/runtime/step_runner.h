// What the engine asks of a device: run one step. An executable does; tests bring runners of their
// own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "effinfer/compiler.h"
#include "effinfer/device.h"
#include "effinfer/error.h"
#include "effinfer/kv_cache.h"
#include "effinfer/threads.h"

namespace effinfer::runtime {

struct StepLimits {
  int64_t max_tokens = 0;     // T of a step
  int64_t max_sequences = 0;  // S of a step
  int64_t max_rows = 0;       // R of a step
};

class StepRunner {
 public:
  virtual ~StepRunner() = default;
  // Writes K and V of the batch's tokens into `cache` and float32 logits [R, vocab] of its
  // logit_rows, which may be none.
  virtual void run(const Batch& batch, KvCache& cache, std::span<float> logits) = 0;
  // run_top() writes the highest logits of each row, at most max_top() of them, in place of all.
  virtual int32_t max_top() const { return 0; }
  virtual void run_top(const Batch&, KvCache&, const TopLogits&) {
    throw InternalError("[engine] runner: it keeps no highest logits");
  }
  // Where it draws tokens, run_drawn() does it in place of writing logits, and read_row() reads
  // those of a row until the next step.
  virtual bool draws_tokens() const { return false; }
  virtual void run_drawn(const Batch&, KvCache&, const DrawnTokens&) {
    throw InternalError("[engine] runner: it draws no tokens");
  }
  virtual void read_row(int64_t, std::span<float>) {
    throw InternalError("[engine] runner: it keeps no logits");
  }
  // A value of the graph behind the logits, as the last step left it.
  virtual NamedRows output(std::string_view) const {
    throw InternalError("[engine] runner: its graph returns logits alone");
  }
  virtual int64_t vocab_size() const = 0;
  // Ids that rows may have: those of tokens, and behind them those of rows that only probe.
  virtual int64_t num_ids() const { return vocab_size(); }
  virtual StepLimits limits() const = 0;
  // For work between steps.
  virtual std::shared_ptr<ThreadPool> pool() const { return std::make_shared<ThreadPool>(1); }
  // The level at which rows of its logits are narrowed, too.
  virtual Isa isa() const { return current_isa(); }
};

std::unique_ptr<StepRunner> make_runner(std::shared_ptr<Executable> executable);

}  // namespace effinfer::runtime
