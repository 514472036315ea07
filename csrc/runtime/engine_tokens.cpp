// The end of a step: from the rows' logits to the requests' tokens, by way of the verifier.
#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "core/philox.h"
#include "effinfer/error.h"
#include "runtime/engine_core.h"

namespace effinfer::runtime {

// A request's rows, and what the verifier made of them.
class EngineCore::Rows final : public TokenRows {
 public:
  // `first_row` is that of the request's last token.
  Rows(EngineCore& core, Request& request, size_t first_row, StepOutput& output)
      : core_(core), request_(request), first_row_(first_row), output_(output) {}

  RequestId request() const override { return request_.id; }

  SampledToken sample(int32_t row) override { return core_.sample_row(request_, place(row)); }

  SampledToken scored(int32_t row, int32_t token) override {
    core_.check_tokens({&token, 1}, "emitted token");
    SampledToken scored = {token, 0.0f, {}};
    const size_t at = place(row) * static_cast<size_t>(core_.vocab_size());
    if (request_.params.logprobs < 0) return scored;
    core_.sampler_.add_logprobs({core_.logits_.get() + at, static_cast<size_t>(core_.vocab_size())},
                                request_.params, scored);
    return scored;
  }

  void distribution(int32_t row, std::span<float> probabilities) override {
    if (core_.top_k_ > 0) {
      throw InvalidArgument(
          "[speculation] distribution: expected needs_distributions() of the "
          "verifier to be true");
    }
    const auto vocab = static_cast<size_t>(core_.vocab_size());
    const std::span<const float> logits = {core_.logits_.get() + place(row) * vocab, vocab};
    const std::span<const int32_t> output = output_behind(row);
    const size_t ahead = output.size() - std::min(output.size(), request_.output().size());
    const Ahead state(request_.constraint.get(), output.last(ahead));
    core_.sampler_.distribution(logits, request_.params, request_.prompt(), output, probabilities,
                                core_.allowed_tokens(request_), output.size(), &request_.mirostat);
  }

  int64_t vocab_size() const override { return core_.vocab_size(); }

  double uniform(uint32_t draw) const override {
    return philox_uniform(request_.params.seed, request_.output().size(), 0, draw);
  }

  bool emit(int32_t row, SampledToken token) override {
    if (reason_ != FinishReason::none) {
      throw InvalidArgument("[speculation] emit: the request has ended");
    }
    core_.check_tokens({&token.token, 1}, "emitted token");
    follow(row);
    if (request_.constraint != nullptr && !request_.constraint->accept(token.token)) {
      throw InvalidArgument("[engine] constraint: expected it to accept a token that it allows, " +
                            std::to_string(token.token));
    }
    request_.mirostat = request_.next_mirostat;
    if (request_.output().empty()) request_.metrics.time_to_first_token_s = request_.seconds();
    request_.tokens.push_back(token.token);
    ++request_.metrics.output_tokens;
    reason_ = core_.finish_reason(request_, token.token);
    output_.tokens.push_back(std::move(token));
    return reason_ == FinishReason::none;
  }

  FinishReason reason() const { return reason_; }

 private:
  // A constraint that has gone ahead of what was emitted, along a path of drafts.
  class Ahead {
   public:
    Ahead(TokenConstraint* constraint, std::span<const int32_t> tokens) : constraint_(constraint) {
      if (constraint == nullptr) return;
      for (const int32_t token : tokens) {
        if (constraint->accept(token)) {
          ++accepted_;
          continue;
        }
        constraint->rollback(accepted_);
        throw InvalidArgument("[speculation] distribution: the constraint does not allow the path");
      }
    }
    ~Ahead() {
      if (accepted_ > 0) constraint_->rollback(accepted_);
    }
    Ahead(const Ahead&) = delete;
    Ahead& operator=(const Ahead&) = delete;

   private:
    TokenConstraint* constraint_;
    int32_t accepted_ = 0;
  };

  // The request's output as it would be at a row, the tokens of its path emitted.
  std::span<const int32_t> output_behind(int32_t row) {
    const std::span<const int32_t> output = request_.output();
    path_tokens_.clear();
    for (int32_t node = row - 1; node >= 0;) {
      const Draft& draft = request_.drafts->draft;
      path_tokens_.push_back(draft.tokens[static_cast<size_t>(node)]);
      node = draft.parents[static_cast<size_t>(node)];
    }
    const size_t emitted = output_.tokens.size();
    if (path_tokens_.size() == emitted) return output;
    path_tokens_.insert(path_tokens_.end(), output.rbegin() + static_cast<ptrdiff_t>(emitted),
                        output.rend());
    std::reverse(path_tokens_.begin(), path_tokens_.end());
    return path_tokens_;
  }

  size_t place(int32_t row) const {
    if (row >= 0 && static_cast<size_t>(row) < request_.num_rows()) {
      return first_row_ + static_cast<size_t>(row);
    }
    throw InvalidArgument("[speculation] row: expected 0.." +
                          std::to_string(request_.num_rows() - 1) + ", got " + std::to_string(row));
  }

  // A row is the root's first, then that of a node with the token that was emitted last.
  void follow(int32_t row) {
    place(row);
    if (output_.tokens.empty() && row == 0) return;
    const auto node = static_cast<size_t>(row) - 1;
    const int32_t last = path_.empty() ? -1 : path_.back();
    if (output_.tokens.empty() || row == 0 || request_.drafts->draft.parents[node] != last ||
        request_.drafts->draft.tokens[node] != request_.tokens.back()) {
      throw InvalidArgument("[speculation] emit: expected row 0 first, then the row of a child " +
                            std::string("whose token was emitted last, got row ") +
                            std::to_string(row));
    }
    path_.push_back(static_cast<int32_t>(node));
  }

  EngineCore& core_;
  Request& request_;
  size_t first_row_;
  StepOutput& output_;
  FinishReason reason_ = FinishReason::none;
  std::vector<int32_t>& path_ = core_.next_path();
  std::vector<int32_t> path_tokens_;
};

// The nodes that the request at hand accepts, in memory that lasts until the step's facts are told.
std::vector<int32_t>& EngineCore::next_path() {
  std::vector<int32_t>& path = paths_[facts_.size()];
  path.clear();
  return path;
}

// Ends a step: its tokens are in the cache, and whose last token was fed gets the next ones.
void EngineCore::advance(std::span<Request* const> requests, std::vector<StepOutput>& outputs) {
  size_t row = 0;
  for (Request* request : requests) {
    if (request->scores_prompt()) {
      const size_t rows = request->chunk().size();
      outputs.push_back(advance_prompt(*request, row));
      row += rows;
    } else if (request->samples()) {
      const size_t rows = request->num_rows();
      outputs.push_back(verify(*request, row, begin_output(*request)));
      row += rows;
    } else {
      const size_t first = request->fed;
      commit(*request, {});
      std::string error = run_hooks(*request, first);
      if (!error.empty()) outputs.push_back(end(*request, FinishReason::error, std::move(error)));
    }
  }
}

StepOutput EngineCore::begin_output(Request& request) {
  StepOutput output;
  output.request = request.id;
  output.warning = std::move(request.warning);
  request.warning.clear();
  request.changed = true;
  return output;
}

// The step's tokens, and of its drafts those with these numbers, are in the cache.
void EngineCore::commit(Request& request, std::span<const int32_t> accepted) {
  const bool in_prompt = request.fed < request.prompt_size;
  if (request.drafts == nullptr) {
    cache_->commit(request.sequence, request.step_tokens);
  } else {
    kept_.clear();
    for (int32_t i = 0; i < request.step_tokens; ++i) kept_.push_back(i);
    for (const int32_t node : accepted) {
      kept_.push_back(static_cast<int32_t>(request.step_tokens) + node);
    }
    cache_->keep(request.sequence, kept_);
  }
  request.fed += static_cast<size_t>(request.step_tokens) + accepted.size();
  request.step_tokens = 0;
  if (!in_prompt || request.fed < request.prompt_size) return;
  if (options_.prefix_cache) cache_->publish(request.sequence);
  fork_prompt(request);
}

StepOutput EngineCore::verify(Request& request, size_t row, StepOutput output) {
  static const Draft kNoDraft;
  const Draft& draft = request.drafts == nullptr ? kNoDraft : request.drafts->draft;
  output.tokens.reserve(draft.tokens.size() + 1);
  Rows rows(*this, request, row, output);
  const std::vector<int32_t>& path = paths_[facts_.size()];
  std::string error = std::move(request.failure);
  try {
    if (error.empty() && request.params.mirostat != 0 && request.params.max_tokens > 0) {
      // Its bound moves with what is sampled: there are no drafts, and nothing for a verifier to
      // do.
      rows.emit(0, rows.sample(0));
    } else if (error.empty() && request.params.max_tokens > 0) {
      speculator_.verifier().verify(draft, rows);
      if (output.tokens.empty()) error = "[speculation] verifier: expected at least one token";
    }
  } catch (const std::exception& failure) {
    error = failure.what();
    if (error.empty()) error = "[engine] the step failed";
  }
  count_drafts(request, path);
  const size_t first = request.fed;
  commit(request, path);
  add_facts(request, output.tokens.size(), path, row);
  request.drafts = nullptr;
  FinishReason reason = request.params.max_tokens > 0 ? rows.reason() : FinishReason::length;
  if (error.empty() && reason == FinishReason::none) error = run_hooks(request, first);
  if (!error.empty()) reason = FinishReason::error;
  if (reason == FinishReason::none) return output;
  StepOutput last = end(request, reason, std::move(error));
  last.stop_token =
      reason == FinishReason::stop && is_stop_token(request, output.tokens.back().token);
  last.tokens = std::move(output.tokens);
  last.warning = std::move(output.warning);
  last.prompt = std::move(output.prompt);
  return last;
}

SampledToken EngineCore::sample_row(Request& request, size_t row) {
  const uint64_t index = request.output().size();
  if (top_k_ > 0) {
    const auto k = static_cast<size_t>(top_k_);
    return sampler_.sample_top(std::span(top_values_).subspan(row * k, k),
                               std::span(top_tokens_).subspan(row * k, k), request.params, index);
  }
  const auto vocab = static_cast<size_t>(vocab_size());
  const std::span<float> logits(logits_.get() + row * vocab, vocab);
  if (!draws_.empty()) {
    if (decided_[row] != 0 && draws_[row].index == index) return {drawn_tokens_[row], 0.0f, {}};
    runner_->read_row(static_cast<int64_t>(row), logits);
  }
  request.next_mirostat = request.mirostat;
  return sampler_.sample(logits, request.params, request.prompt(), request.output(), index,
                         allowed_tokens(request), &request.next_mirostat);
}

// What may follow the request's tokens, until the next call; empty: anything.
std::span<const uint32_t> EngineCore::allowed_tokens(const Request& request) {
  if (request.constraint == nullptr) return {};
  request.constraint->fill(allowed_);
  return allowed_;
}

bool EngineCore::is_stop_token(const Request& request, int32_t token) const {
  const auto contains = [token](const std::vector<int32_t>& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  const bool eos = !request.params.ignore_eos && contains(options_.eos_token_ids);
  return eos || contains(request.params.stop_token_ids);
}

FinishReason EngineCore::finish_reason(const Request& request, int32_t token) const {
  if (is_stop_token(request, token)) return FinishReason::stop;
  if (request.constraint != nullptr && request.constraint->ended()) return FinishReason::stop;
  const bool full = static_cast<int64_t>(request.tokens.size()) >= most_tokens(request.techniques);
  const bool enough = request.metrics.output_tokens >= request.params.max_tokens;
  return full || enough ? FinishReason::length : FinishReason::none;
}

}  // namespace effinfer::runtime
