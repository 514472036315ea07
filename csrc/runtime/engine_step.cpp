// A step of the engine, in order: what other threads left, admission, the policy's choice, room in
// the cache, the run, tokens.
#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "effinfer/error.h"
#include "runtime/engine_core.h"
#include "runtime/engine_impl.h"

namespace effinfer {

bool Engine::has_work() const {
  return impl_->core->has_work();
}

std::vector<StepOutput> Engine::step() {
  return impl_->core->step();
}

}  // namespace effinfer

namespace effinfer::runtime {
namespace {

// What runs an engine's steps.
class ExecutableRunner final : public StepRunner {
 public:
  explicit ExecutableRunner(std::shared_ptr<Executable> executable)
      : executable_(std::move(executable)) {}
  void run(const Batch& batch, KvCache& cache, std::span<float> logits) override {
    executable_->run(batch, cache, logits);
  }
  int32_t max_top() const override { return executable_->max_top(); }
  void run_top(const Batch& batch, KvCache& cache, const TopLogits& top) override {
    executable_->run_top(batch, cache, top);
  }
  int64_t vocab_size() const override { return executable_->vocab_size(); }
  StepLimits limits() const override {
    const CompileOptions& options = executable_->options();
    return {options.max_tokens, options.max_sequences, options.max_rows};
  }

 private:
  std::shared_ptr<Executable> executable_;
};

}  // namespace

std::unique_ptr<StepRunner> make_runner(std::shared_ptr<Executable> executable) {
  return std::make_unique<ExecutableRunner>(std::move(executable));
}

bool EngineCore::has_work() const {
  const std::lock_guard lock(mutex_);
  return unfinished_ > 0;
}

std::vector<StepOutput> EngineCore::step() {
  const std::lock_guard lock(step_mutex_);
  std::vector<StepOutput> outputs;
  take_inbox(outputs);
  if (!waiting_.empty()) admit(outputs);
  if (!running_.empty()) {
    const StepChoice choice =
        policy_->choose(scheduled(running_), {options_.max_batch_tokens, options_.mixed_phases});
    append_chunks(choice, outputs);
    run_chunks(choice.phase, outputs);
    const std::lock_guard stats_lock(mutex_);
    ++stats_.steps;
  }
  publish();
  return outputs;
}

void EngineCore::take_inbox(std::vector<StepOutput>& outputs) {
  std::set<RequestId> cancelled;
  {
    const std::lock_guard lock(mutex_);
    for (auto& request : incoming_) waiting_.push_back(std::move(request));
    incoming_.clear();
    cancelled.swap(cancelled_);
  }
  if (cancelled.empty()) return;
  for (Requests* requests : {&running_, &waiting_}) {
    for (const auto& request : *requests) {
      if (!cancelled.contains(request->id)) continue;
      outputs.push_back(end(*request, FinishReason::cancelled));
    }
  }
  publish();
}

std::vector<ScheduledRequest> EngineCore::scheduled(const Requests& requests) {
  std::vector<ScheduledRequest> views;
  views.reserve(requests.size());
  for (const auto& request : requests) views.push_back(request->scheduled());
  return views;
}

// Makes room in the cache for what the policy chose; whoever loses its pages leaves the step.
void EngineCore::append_chunks(const StepChoice& choice, std::vector<StepOutput>& outputs) {
  std::vector<Request*> requests;
  for (const StepChunk& chunk : choice.chunks) requests.push_back(running_.at(chunk.request).get());
  for (size_t i = 0; i < requests.size(); ++i) {
    Request& request = *requests[i];
    if (request.sequence == Request::kNoSequence) continue;
    const int64_t count = choice.chunks[i].count;
    const std::span<const int32_t> pending = std::span(request.tokens).subspan(request.fed);
    if (count < 1 || count > static_cast<int64_t>(pending.size()) || request.step_tokens != 0) {
      throw InternalError("[engine] policy: a chunk of " + std::to_string(count) + " tokens of " +
                          std::to_string(pending.size()));
    }
    if (cache_->can_append(request.sequence, count) || make_room(request.sequence, count)) {
      cache_->append(request.sequence, pending.first(static_cast<size_t>(count)));
      request.step_tokens = count;
    } else if (request.sequence != Request::kNoSequence) {
      outputs.push_back(end(request, FinishReason::error,
                            "[engine] no KV page is left for the only running request"));
    }
  }
}

void EngineCore::run_chunks(Phase phase, std::vector<StepOutput>& outputs) {
  std::vector<Request*> active;
  for (const auto& request : running_) {
    if (request->step_tokens > 0) active.push_back(request.get());
  }
  if (active.empty()) return;
  std::string error = try_run(active, phase);
  if (error.empty()) return advance(active, outputs);
  // Someone's tokens broke the step: run each request alone, and end those that fail alone.
  for (Request*& request : active) {
    const std::span<Request* const> alone(&request, 1);
    if (active.size() > 1) error = try_run(alone, phase);
    if (error.empty()) {
      advance(alone, outputs);
    } else {
      outputs.push_back(end(*request, FinishReason::error, error));
    }
  }
}

// Runs one step; returns what went wrong, or nothing.
std::string EngineCore::try_run(std::span<Request* const> requests, Phase phase) {
  batch_.clear(phase);
  for (const Request* request : requests) {
    batch_.add(*cache_, request->sequence, request->chunk(),
               request->samples() ? StepBatch::Logits::last : StepBatch::Logits::none);
  }
  const size_t rows = batch_.num_rows();
  top_k_ = wanted_logits(requests);
  try {
    if (top_k_ > 0) {
      const size_t values = rows * static_cast<size_t>(top_k_);
      runner_->run_top(
          batch_.view(), *cache_,
          {top_k_, std::span(top_values_).first(values), std::span(top_tokens_).first(values)});
    } else {
      runner_->run(batch_.view(), *cache_,
                   {logits_.get(), rows * static_cast<size_t>(vocab_size())});
    }
  } catch (const std::exception& failure) {
    const std::string what = failure.what();
    return what.empty() ? "[engine] the step failed" : what;
  }
  return {};
}

// Ends a step: its tokens are in the cache, and whose last token was fed gets the next one.
void EngineCore::advance(std::span<Request* const> requests, std::vector<StepOutput>& outputs) {
  size_t row = 0;
  for (Request* request : requests) {
    const bool samples = request->samples();
    const bool in_prompt = request->fed < request->prompt_size;
    cache_->commit(request->sequence, request->step_tokens);
    request->fed += static_cast<size_t>(request->step_tokens);
    request->step_tokens = 0;
    if (options_.prefix_cache && in_prompt && request->fed >= request->prompt_size) {
      cache_->publish(request->sequence);
    }
    if (samples) outputs.push_back(sample(*request, row++));
  }
}

// How many of the highest logits suffice for all rows of a step; 0: all logits are needed, or the
// runner cannot pick.
int32_t EngineCore::wanted_logits(std::span<Request* const> requests) const {
  int32_t most = 0;
  for (const Request* request : requests) {
    if (!request->samples()) continue;
    const int32_t count = Sampler::sufficient_top(request->params, vocab_size());
    if (count == 0 || count > runner_->max_top()) return 0;
    most = std::max(most, count);
  }
  return most;
}

SampledToken EngineCore::sample_row(const Request& request, size_t row) {
  const uint64_t index = request.output().size();
  if (top_k_ > 0) {
    const auto k = static_cast<size_t>(top_k_);
    return sampler_.sample_top(std::span(top_values_).subspan(row * k, k),
                               std::span(top_tokens_).subspan(row * k, k), request.params, index);
  }
  const auto vocab = static_cast<size_t>(vocab_size());
  return sampler_.sample({logits_.get() + row * vocab, vocab}, request.params, request.prompt(),
                         request.output(), index);
}

StepOutput EngineCore::sample(Request& request, size_t row) {
  const uint64_t index = request.output().size();
  SampledToken sampled;
  try {
    sampled = sample_row(request, row);
  } catch (const std::exception& failure) {
    return end(request, FinishReason::error, failure.what());
  }
  if (index == 0) request.metrics.time_to_first_token_s = request.seconds();
  request.tokens.push_back(sampled.token);
  request.metrics.output_tokens = static_cast<int64_t>(index) + 1;
  request.changed = true;
  const FinishReason reason = finish_reason(request, sampled.token);
  StepOutput output =
      reason == FinishReason::none ? StepOutput{request.id, {}, reason, {}} : end(request, reason);
  output.tokens.push_back(std::move(sampled));
  return output;
}

FinishReason EngineCore::finish_reason(const Request& request, int32_t token) const {
  const auto contains = [token](const std::vector<int32_t>& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  const bool eos = !request.params.ignore_eos && contains(options_.eos_token_ids);
  if (eos || contains(request.params.stop_token_ids)) return FinishReason::stop;
  const bool full = static_cast<int64_t>(request.tokens.size()) >= options_.max_seq_len;
  const bool enough = request.metrics.output_tokens >= request.params.max_tokens;
  return full || enough ? FinishReason::length : FinishReason::none;
}

// Ends a request: its pages go, its output says why. publish() removes it.
StepOutput EngineCore::end(Request& request, FinishReason reason, std::string error) {
  if (request.sequence != Request::kNoSequence) {
    cache_->release(request.sequence, options_.prefix_cache && reason != FinishReason::error);
    request.sequence = Request::kNoSequence;
  }
  request.step_tokens = 0;
  request.finished = reason;
  request.changed = true;
  request.metrics.total_s = request.seconds();
  return {request.id, {}, reason, std::move(error)};
}

// Shows other threads what changed, and drops the requests that ended.
void EngineCore::publish() {
  const std::lock_guard lock(mutex_);
  for (Requests* requests : {&running_, &waiting_}) {
    for (const auto& request : *requests) {
      if (!request->changed) continue;
      request->changed = false;
      Record& record = records_[request->id];
      record.metrics = request->metrics;
      record.finished = request->finished != FinishReason::none;
      unfinished_ -= record.finished ? 1 : 0;
    }
    std::erase_if(*requests, [](const auto& r) { return r->finished != FinishReason::none; });
  }
  stats_.running = static_cast<int64_t>(running_.size());
  stats_.free_pages = cache_->free_pages();
}

}  // namespace effinfer::runtime
