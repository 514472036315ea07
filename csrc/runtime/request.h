// A request inside the engine.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "effinfer/engine.h"
#include "effinfer/kv_cache.h"
#include "ops/visits.h"
#include "runtime/scheduler.h"
#include "runtime/speculative/draft.h"
#include "runtime/techniques.h"

namespace effinfer::runtime {

struct Request {
  using Clock = std::chrono::steady_clock;
  static constexpr SequenceId kNoSequence = -1;

  RequestId id = 0;
  RequestId group = 0;          // the first answer to the same prompt; 0: it is the only one
  std::vector<int32_t> tokens;  // prompt, then output
  size_t prompt_size = 0;
  SamplingParams params;
  RequestTechniques techniques;
  std::shared_ptr<TokenConstraint> constraint;  // has accepted the output; null: none
  Mirostat mirostat;                            // of the output
  Mirostat next_mirostat;                       // with the token that was sampled last
  RequestMetrics metrics;
  Clock::time_point added;

  SequenceId sequence = kNoSequence;  // while running
  // Of a request that waits again after some of its keys were dropped, which feeding its tokens
  // would not give: its sequence, and the slots that this has. Empty: it is fed.
  std::vector<std::byte> saved;
  int64_t saved_slots = 0;
  uint64_t noise_seed = 0;      // of its keys
  size_t fed = 0;               // tokens whose KV is in the cache
  size_t scored = 1;            // tokens of the prompt that need no log-probability any more
  int64_t step_tokens = 0;      // appended for the step at hand, not committed
  DraftTree* drafts = nullptr;  // appended behind them; null: none
  FinishReason finished = FinishReason::none;
  bool changed = false;  // metrics to publish
  std::string warning;   // for its next output
  std::string failure;   // of its constraint, between steps: ends it

  std::span<const int32_t> prompt() const { return std::span(tokens).first(prompt_size); }
  std::span<const int32_t> output() const { return std::span(tokens).subspan(prompt_size); }
  // The tokens of this step, and whether the logits of the last one give the next token.
  std::span<const int32_t> chunk() const {
    return std::span(tokens).subspan(fed, static_cast<size_t>(step_tokens));
  }
  bool samples() const { return fed + static_cast<size_t>(step_tokens) == tokens.size(); }
  // Whether the logits of all its rows are wanted, for the log-probabilities of its prompt.
  bool scores_prompt() const { return params.prompt_logprobs >= 0 && scored < prompt_size; }
  bool has_prompt() const { return fed >= prompt_size; }
  // Rows whose logits give the next tokens: of the last token, and of each draft.
  size_t num_rows() const { return drafts == nullptr ? 1 : drafts->words.size(); }
  // Whether the rows of this step visit all keys, where others' visit chosen ones. Few rows of a
  // prompt would be taken for generated ones.
  bool is_dense() const {
    if (has_prompt()) return techniques.dense_output;
    return techniques.dense_prompt || (techniques.rows_choose && step_tokens < ops::kSparseRows);
  }
  size_t prompt_left() const { return fed < prompt_size ? prompt_size - fed : 0; }
  // Tokens of the prompt up to where a step of it ends.
  size_t prompt_chunk() const {
    const auto chunk = static_cast<size_t>(techniques.chunk_tokens);
    return chunk == 0 ? prompt_left() : std::min(prompt_left(), chunk - fed % chunk);
  }
  ScheduledRequest scheduled() const {
    return {id, static_cast<int64_t>(prompt_chunk()), static_cast<int64_t>(generated_left())};
  }
  // Generated tokens that are fed next. Where rows visit chosen keys, those that are fed again are
  // in steps without the prompt's, and as few as can be told from one.
  size_t generated_left() const {
    const size_t left = tokens.size() - fed - prompt_left();
    if (!techniques.rows_choose) return left;
    return prompt_left() > 0 ? 0 : std::min(left, static_cast<size_t>(kCatchUpTokens));
  }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - added).count(); }
};

}  // namespace effinfer::runtime
