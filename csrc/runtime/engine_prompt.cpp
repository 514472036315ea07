// What the model thinks of a prompt: the log-probabilities of its tokens, as chunks of it are
// computed.
#include <algorithm>
#include <exception>
#include <memory>
#include <utility>

#include "runtime/engine_core.h"
#include "runtime/row_scratch.h"

namespace effinfer::runtime {

// Memory for the logits of so many rows, and the highest of each.
void EngineCore::resize_rows(int64_t rows) {
  num_rows_ = rows;
  logits_ = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(rows * vocab_size()));
  const auto tops = static_cast<size_t>(rows * std::max(runner_->max_top(), speculator_.top_k()));
  top_values_.resize(tops);
  top_tokens_.resize(tops);
  draws_.reserve(static_cast<size_t>(rows));
  drawn_tokens_.reserve(static_cast<size_t>(rows));
  decided_.reserve(static_cast<size_t>(rows));
}

// Rows of logits for prompts that are scored and for all others.
int64_t EngineCore::prompt_rows() const {
  const int64_t slice = std::min(slice_rows(vocab_size()), options_.max_batch_tokens);
  return std::min(runner_->limits().max_rows, most_rows() + slice);
}

// Once somebody asks for it.
void EngineCore::make_prompt_rows() {
  if (prompt_rows() > num_rows_) resize_rows(prompt_rows());
}

// Where steps of a prompt end at fixed places, one that is scored has shorter ones: each of its
// rows needs logits, of which there is room beside any other requests. What that makes of it is not
// what others find in the cache.
void EngineCore::score_in_chunks(Request& request) const {
  int64_t& chunk = request.techniques.chunk_tokens;
  if (chunk == 0) return;
  const int64_t rows = std::max<int64_t>(1, prompt_rows() - options_.max_sequences);
  chunk = std::min(
      chunk, rows < KvCache::kPageSize ? rows : rows / KvCache::kPageSize * KvCache::kPageSize);
  request.techniques.prefix.most = 0;
}

// Rows of logits that the step has left when each running request has one.
int64_t EngineCore::free_rows() const {
  int64_t rows = num_rows_ - static_cast<int64_t>(running_.size());
  for (const auto& request : running_) {
    if (request->step_tokens > 0 && request->scores_prompt()) rows -= request->step_tokens - 1;
  }
  return rows;
}

// The rows from `row` on are of the chunk's tokens: each says how likely the next one was. After a
// preemption the first of them have been told.
void EngineCore::score_prompt(Request& request, size_t row, StepOutput& output) {
  SamplingParams wanted;
  wanted.logprobs = request.params.prompt_logprobs;
  const auto vocab = static_cast<size_t>(vocab_size());
  const size_t end = std::min(request.fed + request.chunk().size() + 1, request.prompt_size);
  for (; request.scored < end; ++request.scored) {
    SampledToken token = {request.tokens[request.scored], 0.0f, {}};
    const size_t at = row + request.scored - 1 - request.fed;
    sampler_.add_logprobs({logits_.get() + at * vocab, vocab}, wanted, token);
    output.prompt.push_back(std::move(token));
  }
}

// Ends a step of a request whose prompt is scored.
StepOutput EngineCore::advance_prompt(Request& request, size_t row) {
  StepOutput output = begin_output(request);
  const size_t last = row + request.chunk().size() - 1;
  try {
    score_prompt(request, row, output);
  } catch (const std::exception& failure) {
    return end(request, FinishReason::error, failure.what());
  }
  if (request.samples()) return verify(request, last, std::move(output));
  const size_t first = request.fed;
  commit(request, {});
  std::string error = run_hooks(request, first);
  if (error.empty()) return output;
  StepOutput ended = end(request, FinishReason::error, std::move(error));
  ended.warning = std::move(output.warning);
  ended.prompt = std::move(output.prompt);
  return ended;
}

}  // namespace effinfer::runtime
