// A step of the engine, in order: what other threads left, admission, the policy's choice, room in
// the cache, the run, tokens.
#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <string>
#include <utility>

#include "core/log.h"
#include "effinfer/error.h"
#include "runtime/engine_core.h"
#include "runtime/engine_impl.h"
#include "runtime/key_noise.h"

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

using Clock = Request::Clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

// Of rows that the runner's tokens are not for: no request has drawn as many.
constexpr uint64_t kNoIndex = std::numeric_limits<uint64_t>::max();

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
  bool draws_tokens() const override { return executable_->draws_tokens(); }
  void run_drawn(const Batch& batch, KvCache& cache, const DrawnTokens& drawn) override {
    executable_->run_drawn(batch, cache, drawn);
  }
  void read_row(int64_t row, std::span<float> logits) override {
    executable_->read_row(row, logits);
  }
  NamedRows output(std::string_view name) const override { return executable_->output(name); }
  int64_t vocab_size() const override { return executable_->vocab_size(); }
  int64_t num_ids() const override {
    const Graph& graph = executable_->graph();
    int64_t rows = std::numeric_limits<int32_t>::max();
    for (const Node& node : graph.nodes) {
      if (node.op != "embedding") continue;
      rows = std::min(rows, graph.value(node.inputs[1]).shape[0].value);
    }
    return rows;
  }
  std::shared_ptr<ThreadPool> pool() const override { return executable_->pool(); }
  Isa isa() const override { return executable_->target().isa; }
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
    choice_.phase = Phase::decode;
    choice_.chunks.clear();
    // Steps of both phases would leave prompts less than a whole chunk.
    const bool mixed = options_.mixed_phases && !techniques_.has_chunks();
    policy_->choose(scheduled(running_), {options_.max_batch_tokens, mixed}, choice_);
    outputs.reserve(outputs.size() + running_.size());
    append_chunks(outputs);
    const Clock::time_point start = Clock::now();
    append_drafts();
    const Clock::time_point drafted = Clock::now();
    run_chunks(choice_.phase, outputs);
    const Clock::time_point ran = Clock::now();
    tell_speculator(choice_.phase, seconds_between(start, drafted), seconds_between(drafted, ran));
    const std::lock_guard stats_lock(mutex_);
    ++stats_.steps;
    stats_.drafting_s += seconds_between(start, drafted) + seconds_between(ran, Clock::now());
  }
  forget_ended();
  if (!prompts_.empty()) drop_unwanted_prompts();
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

// Lasts until the next call.
std::span<const ScheduledRequest> EngineCore::scheduled(const Requests& requests) {
  scheduled_.clear();
  for (const auto& request : requests) scheduled_.push_back(request->scheduled());
  return scheduled_;
}

// Makes room in the cache for what the policy chose; whoever loses its pages leaves the step.
void EngineCore::append_chunks(std::vector<StepOutput>& outputs) {
  active_.clear();  // those chosen: preemption moves requests
  for (const StepChunk& chunk : choice_.chunks) active_.push_back(running_.at(chunk.request).get());
  for (size_t i = 0; i < active_.size(); ++i) {
    Request& request = *active_[i];
    if (request.sequence == Request::kNoSequence) continue;
    int64_t count = choice_.chunks[i].count;
    const std::span<const int32_t> pending = std::span(request.tokens).subspan(request.fed);
    if (count < 1 || count > static_cast<int64_t>(pending.size()) || request.step_tokens != 0) {
      throw InternalError("[engine] policy: a chunk of " + std::to_string(count) + " tokens of " +
                          std::to_string(pending.size()));
    }
    if (request.has_prompt() && encodes(request) && !encode_pages(request.sequence)) {
      if (request.sequence != Request::kNoSequence) outputs.push_back(end_without_room(request));
      continue;
    }
    count = chunk_tokens(request, count);
    if (count == 0) continue;
    if (make_room(request.sequence, count)) {
      cache_->append(request.sequence, pending.first(static_cast<size_t>(count)));
      request.step_tokens = count;
    } else if (request.sequence != Request::kNoSequence) {
      outputs.push_back(end_without_room(request));
    }
  }
}

// How many of the tokens that the policy chose are fed. Where steps of a prompt end at fixed
// places, one that has not all of its chunk waits for a step that does.
int64_t EngineCore::chunk_tokens(const Request& request, int64_t chosen) const {
  const bool fixed = request.techniques.chunk_tokens > 0 && request.prompt_left() > 0;
  const auto wanted = fixed ? static_cast<int64_t>(request.prompt_chunk()) : chosen;
  int64_t count = std::min({chosen, wanted, rows_of_one_state(request)});
  if (request.scores_prompt()) count = std::min(count, 1 + free_rows());
  // Generated tokens that are fed again: hooks run where they ran.
  if (request.prompt_left() == 0) count = std::min(count, tokens_until_hook(request));
  return fixed && count < wanted ? 0 : count;
}

void EngineCore::run_chunks(Phase phase, std::vector<StepOutput>& outputs) {
  active_.clear();
  for (const auto& request : running_) {
    if (request->step_tokens > 0) active_.push_back(request.get());
  }
  if (active_.empty()) return;
  std::string error = try_run(active_, phase);
  if (error.empty()) return advance(active_, outputs);
  // Someone's tokens broke the step: run each request alone and undrafted, and end those that fail
  // alone.
  const bool drafted = drop_drafts();
  for (Request*& request : active_) {
    const std::span<Request* const> alone(&request, 1);
    if (active_.size() > 1 || drafted) error = try_run(alone, phase);
    if (error.empty()) {
      advance(alone, outputs);
    } else {
      outputs.push_back(end(*request, FinishReason::error, error));
    }
  }
  // Each run has overwritten the rows of those before it, and none has the time of the step.
  for (StepFacts& facts : facts_) {
    facts.top = {};
    facts.outputs = {};
  }
  batch_.clear(phase);
}

// Runs one step; returns what went wrong, or nothing.
std::string EngineCore::try_run(std::span<Request* const> requests, Phase phase) {
  batch_.clear(phase);
  for (const Request* request : requests) {
    using Logits = StepBatch::Logits;
    const Logits last = request->samples() ? Logits::last : Logits::none;
    batch_.add(*cache_, request->sequence, request->chunk(),
               request->scores_prompt() ? Logits::all : last, request->drafts, request->is_dense());
    if (request->techniques.unchunked) batch_.set_unchunked();
    add_scored_rows(*request);
  }
  const size_t rows = batch_.num_rows();
  top_k_ = wanted_logits(requests);
  draws_.clear();
  try {
    if (top_k_ > 0) {
      const size_t values = rows * static_cast<size_t>(top_k_);
      runner_->run_top(
          batch_.view(), *cache_,
          {top_k_, std::span(top_values_).first(values), std::span(top_tokens_).first(values)});
    } else if (set_draws(requests)) {
      drawn_tokens_.resize(rows);
      decided_.resize(rows);
      runner_->run_drawn(batch_.view(), *cache_, {draws_, drawn_tokens_, decided_});
    } else {
      runner_->run(batch_.view(), *cache_,
                   {logits_.get(), rows * static_cast<size_t>(vocab_size())});
    }
  } catch (const std::exception& failure) {
    const std::string what = failure.what();
    log(LogLevel::warning, "a step failed: " + what);
    return what.empty() ? "[engine] the step failed" : what;
  }
  outputs_.clear();
  for (const std::string& name : speculator_.outputs()) {
    outputs_.push_back({name, runner_->output(name)});
  }
  return {};
}

// Of the request that was added last. A step of it is of its prompt or of its output.
void EngineCore::add_scored_rows(const Request& request) {
  const auto first = static_cast<int64_t>(request.fed);
  const int64_t end = first + request.step_tokens;
  for (const ScorePlan& plan : request.techniques.scores) {
    const bool counts = request.prompt_left() > 0 ? end > plan.first : plan.output;
    if (!counts) continue;
    SlotPlane noise;
    if (!plan.noise.empty()) {
      noise = cache_->plane(request.sequence, plan.noise);
      const int64_t position = cache_->next_position(request.sequence) - request.step_tokens;
      for (int32_t group = 0; group < cache_->num_whole_groups(); ++group) {
        set_gumbel_noise(
            request.noise_seed, position, request.step_tokens,
            {noise, cache_->first_plane_head(group), cache_->first_plane_head(group + 1),
             cache_->slots(request.sequence, group)});
      }
    }
    batch_.add_scored(plan.name, cache_->plane(request.sequence, plan.name),
                      static_cast<int32_t>(end - std::max(first, plan.first)), noise);
  }
  for (const std::string_view name : request.techniques.weights) {
    batch_.add_weighted(name, cache_->plane(request.sequence, name));
  }
}

// How many of the highest logits suffice for all rows of a step; 0: all logits are needed, or the
// runner cannot pick.
int32_t EngineCore::wanted_logits(std::span<Request* const> requests) const {
  int32_t most = 0;
  for (const Request* request : requests) {
    if (request->scores_prompt()) return 0;
    if (!request->samples()) continue;
    if (request->constraint != nullptr) return 0;
    const int32_t count = Sampler::sufficient_top(request->params, vocab_size());
    if (count == 0 || count > runner_->max_top()) return 0;
    most = std::max(most, count);
  }
  if (most == 0) return 0;
  if (speculator_.verifier().needs_distributions()) return 0;
  return std::max(most, std::min(speculator_.top_k(), runner_->max_top()));
}

// The draws of a step's rows, where the runner can draw the tokens of half of them at least; else
// none, and false. Others' logits are read row by row. The token that follows a draft comes as many
// later as the draft is deep.
bool EngineCore::set_draws(std::span<Request* const> requests) {
  if (!runner_->draws_tokens() || speculator_.top_k() > 0) return false;
  if (speculator_.verifier().needs_distributions()) return false;
  const auto scores = [](const Request* request) { return request->scores_prompt(); };
  if (std::any_of(requests.begin(), requests.end(), scores)) return false;  // of all their rows
  size_t drawn = 0;
  for (const Request* request : requests) {
    if (!request->samples()) continue;
    const SamplingParams& params = request->params;
    const bool draws = request->constraint == nullptr && Sampler::is_drawn_from_logits(params);
    const uint64_t index = request->output().size();
    drawn += draws ? request->num_rows() : 0;
    for (size_t row = 0; row < request->num_rows(); ++row) {
      const int32_t depth = row == 0 ? 0 : request->drafts->depths[row];
      draws_.push_back({params.temperature, params.top_k, params.top_p, params.min_p, params.seed,
                        draws ? index + static_cast<uint64_t>(depth) : kNoIndex});
    }
  }
  if (drawn == 0 || 2 * drawn < draws_.size()) draws_.clear();
  return !draws_.empty();
}

// Ends a request: its pages go, its output says why. publish() removes it.
StepOutput EngineCore::end(Request& request, FinishReason reason, std::string error) {
  if (request.sequence != Request::kNoSequence) {
    if (reason == FinishReason::error || !keep_prompt(request)) {
      cache_->release(request.sequence, options_.prefix_cache && reason != FinishReason::error);
    }
    request.sequence = Request::kNoSequence;
  }
  request.step_tokens = 0;
  request.drafts = nullptr;
  request.finished = reason;
  request.changed = true;
  request.metrics.total_s = request.seconds();
  ended_.push_back(request.id);
  return {request.id, {}, reason, false, std::move(error), std::move(request.warning), {}};
}

StepOutput EngineCore::end_without_room(Request& request) {
  return end(request, FinishReason::error,
             "[engine] no KV page is left for the only running request");
}

// Shows other threads what changed, and drops the requests that ended.
void EngineCore::publish() {
  // Destroyed without the lock: what a request holds may wait for other locks, such as Python's.
  Requests gone;
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
    for (auto& request : *requests) {
      if (request->finished != FinishReason::none) gone.push_back(std::move(request));
    }
    std::erase(*requests, nullptr);
  }
  stats_.running = static_cast<int64_t>(running_.size());
  stats_.free_pages = cache_->free_pages();
}

}  // namespace effinfer::runtime
