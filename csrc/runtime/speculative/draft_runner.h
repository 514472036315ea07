// What a drafter on a device of its own asks of it. A model does; tests bring runners of their own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "effinfer/cancel.h"
#include "effinfer/profile.h"
#include "effinfer/speculative.h"
#include "runtime/speculative/foresight.h"

namespace effinfer::runtime {

// A request's text with guesses behind it, and what the runner believes to follow.
struct AheadText {
  RequestId request = 0;
  std::vector<int32_t> tokens;
  // Where the next token is drawn with a number that is known (Foresight): with which parameters.
  std::shared_ptr<const SamplingParams> params;
  uint64_t index = 0;  // of the next token in the output
  size_t spread = 0;
  // The answer, the likeliest first; none where a refusal says why this text gets no more.
  std::vector<Likely> likely;
  std::optional<Foresight::Firsts> firsts;
  std::string refusal;
};

// Called by one thread at a time.
class DraftRunner {
 public:
  virtual ~DraftRunner() = default;
  virtual int64_t most_texts() const = 0;
  virtual int64_t max_seq_len() const = 0;
  // Answers the texts; of a request it gets texts of any kind, one after the other. Throws
  // Cancelled soon after it is.
  virtual void run(std::span<AheadText> texts, const CancelToken& cancel) = 0;
  // The request has ended.
  virtual void release(RequestId request) = 0;
  virtual void start_profile(int64_t /*max_steps*/) {}
  virtual Profile take_profile() { return {}; }
};

}  // namespace effinfer::runtime
