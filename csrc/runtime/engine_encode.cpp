// Encoding in the engine: a row of a generated token at slot n reads encoded what is due when n
// slots are committed, whoever else is in the step, and however many rows of its own are.
#include <limits>

#include "runtime/engine_core.h"

namespace effinfer::runtime {

// Before a step of generated tokens; false when there is no room for it, as with make_room().
bool EngineCore::encode_pages(SequenceId sequence) {
  while (!cache_->can_encode(sequence)) {
    if (!take_pages(sequence)) return false;
  }
  cache_->encode(sequence, *pool_);
  return true;
}

// Rows that the request may have in its next step. Prompts are computed with all pages as they were
// written.
int64_t EngineCore::rows_of_one_state(const Request& request) const {
  if (!encodes(request)) return std::numeric_limits<int64_t>::max();
  if (!request.has_prompt()) return static_cast<int64_t>(request.prompt_left());
  return cache_->slots_before_encoding(request.sequence);
}

}  // namespace effinfer::runtime
