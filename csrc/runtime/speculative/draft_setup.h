// A draft model made ready for a target.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "effinfer/job_executor.h"
#include "effinfer/speculative.h"
#include "runtime/speculative/draft_steps.h"

namespace effinfer::runtime {

struct DraftSetup {
  std::unique_ptr<DraftSteps> steps;
  std::vector<int32_t> tokens;  // that the logits are of, where the head has been cut; empty: all
  int64_t num_ids = 0;

  // The ids of a row's highest logits; `room` keeps them where they are others.
  std::span<const int32_t> ids_of(std::span<const int32_t> places,
                                  std::vector<int32_t>& room) const;
  // Why a text of `size` tokens, `fresh` of which the model has not read, cannot be drafted for;
  // empty: it can.
  std::string trouble(std::span<const int32_t> fresh, int64_t size) const;
  std::string out_of_pages() const;
};

// Throws InvalidArgument for values out of range.
void check_options(const DraftModelOptions& options);

// Compiles the model on the target's threads or on an executor of its own, for `rows` rows of
// logits a sequence. Throws as compile() does.
DraftSetup set_up_draft(const DraftModelOptions& options, const Executable& target,
                        const JobExecutor* executor, int64_t rows);

}  // namespace effinfer::runtime
