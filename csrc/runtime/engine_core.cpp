#include "runtime/engine_core.h"

#include <algorithm>
#include <string>
#include <utility>

#include "effinfer/error.h"

namespace effinfer::runtime {
namespace {

void require_positive(const char* option, int64_t value) {
  if (value > 0) return;
  throw InvalidArgument(std::string("[engine] ") + option + ": expected at least 1, got " +
                        std::to_string(value));
}

// Moves a request to where its id belongs.
template <class Requests>
void move_request(Requests& from, size_t index, Requests& to) {
  auto request = std::move(from[index]);
  from.erase(from.begin() + static_cast<ptrdiff_t>(index));
  const auto place =
      std::lower_bound(to.begin(), to.end(), request->id,
                       [](const auto& other, RequestId id) { return other->id < id; });
  to.insert(place, std::move(request));
}

size_t checked_index(size_t index, size_t size) {
  if (index < size) return index;
  throw InternalError("[engine] policy: expected an index below " + std::to_string(size) +
                      ", got " + std::to_string(index));
}

}  // namespace

EngineCore::EngineCore(std::unique_ptr<StepRunner> runner, std::unique_ptr<KvCache> cache,
                       const EngineCoreOptions& options, std::unique_ptr<SchedulerPolicy> policy)
    : runner_(std::move(runner)),
      cache_(std::move(cache)),
      options_(options),
      policy_(policy ? std::move(policy) : make_fcfs_policy()),
      sampler_(runner_->isa()),
      speculator_(options.speculation, runner_->vocab_size(),
                  static_cast<size_t>(std::max<int64_t>(options.max_sequences, 1))) {
  require_positive("max_seq_len", options.max_seq_len);
  require_positive("max_batch_tokens", options.max_batch_tokens);
  require_positive("max_sequences", options.max_sequences);
  const StepLimits limits = runner_->limits();
  const int64_t capacity = int64_t{cache_->config().num_pages} * KvCache::kPageSize;
  options_.max_seq_len = std::min(options.max_seq_len, capacity);
  options_.max_batch_tokens = std::min(options.max_batch_tokens, limits.max_tokens);
  options_.max_sequences = std::min({options.max_sequences, limits.max_sequences, limits.max_rows});
  const int64_t rows = most_rows();
  logits_ = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(rows * vocab_size()));
  const auto tops = static_cast<size_t>(rows * std::max(runner_->max_top(), speculator_.top_k()));
  top_values_.resize(tops);
  top_tokens_.resize(tops);
  const auto sequences = static_cast<size_t>(options_.max_sequences);
  batch_.reserve(static_cast<size_t>(limits.max_tokens), sequences,
                 static_cast<size_t>(cache_->config().num_pages));
  scheduled_.reserve(sequences);
  choice_.chunks.reserve(sequences);
  active_.reserve(sequences);
  facts_.reserve(sequences);
  ended_.reserve(sequences);
  paths_.resize(sequences + 1);
  for (auto& path : paths_) path.reserve(Draft::kMostNodes);
  kept_.reserve(Draft::kMostNodes + kCatchUpTokens);
  allowed_.resize((static_cast<size_t>(vocab_size()) + 31) / 32);
  stats_.total_pages = cache_->config().num_pages;
  stats_.free_pages = cache_->available_pages();
}

void EngineCore::check_tokens(std::span<const int32_t> tokens, const char* argument) const {
  const auto label = [&] { return std::string("[engine] ") + argument + ": expected "; };
  if (tokens.empty()) throw InvalidArgument(label() + "at least one token, got none");
  for (const int32_t token : tokens) {
    if (token >= 0 && token < vocab_size()) continue;
    throw InvalidArgument(label() + "token ids in 0.." + std::to_string(vocab_size() - 1) +
                          ", got " + std::to_string(token));
  }
}

RequestId EngineCore::add(std::span<const int32_t> prompt, const SamplingParams& params,
                          std::shared_ptr<TokenConstraint> constraint) {
  check_tokens(prompt, "prompt");
  params.validate(vocab_size());
  if (static_cast<int64_t>(prompt.size()) >= options_.max_seq_len) {
    throw InvalidArgument("[engine] prompt: expected at most " +
                          std::to_string(options_.max_seq_len - 1) +
                          " tokens (the context of the engine, limited by max_seq_len and " +
                          "num_pages, less one to generate), got " + std::to_string(prompt.size()));
  }
  auto request = std::make_unique<Request>();
  const auto room = options_.max_seq_len - static_cast<int64_t>(prompt.size());
  const auto more = std::min<int64_t>(params.max_tokens, room);
  request->tokens.reserve(prompt.size() + static_cast<size_t>(more));
  request->tokens.assign(prompt.begin(), prompt.end());
  request->prompt_size = prompt.size();
  request->params = params;
  request->constraint = std::move(constraint);
  request->metrics.speculation.guarantee = speculator_.verifier().guarantee();
  request->metrics.prompt_tokens = static_cast<int64_t>(prompt.size());
  request->added = Request::Clock::now();
  const std::lock_guard lock(mutex_);
  const RequestId id = next_id_++;
  request->id = id;
  records_[id].metrics = request->metrics;
  incoming_.push_back(std::move(request));
  ++unfinished_;
  return id;
}

void EngineCore::cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  const auto record = records_.find(id);
  if (record != records_.end() && !record->second.finished) cancelled_.insert(id);
}

RequestMetrics EngineCore::metrics(RequestId id) const {
  const std::lock_guard lock(mutex_);
  const auto record = records_.find(id);
  if (record == records_.end()) {
    throw InvalidArgument("[engine] request: no request " + std::to_string(id));
  }
  return record->second.metrics;
}

void EngineCore::forget(RequestId id) {
  const std::lock_guard lock(mutex_);
  const auto record = records_.find(id);
  if (record != records_.end() && record->second.finished) records_.erase(record);
}

EngineStats EngineCore::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.waiting = unfinished_ - stats.running;
  return stats;
}

// Takes waiting requests while the step has room for their prompts. Later ones wait, so that they
// find the prefixes that earlier ones compute.
void EngineCore::admit(std::vector<StepOutput>& outputs) {
  int64_t pending = 0;
  for (const auto& request : running_) pending += request->scheduled().prompt_tokens;
  while (!waiting_.empty() && static_cast<int64_t>(running_.size()) < options_.max_sequences &&
         pending < options_.max_batch_tokens) {
    const size_t index = checked_index(policy_->admit(scheduled(waiting_)), waiting_.size());
    Request& request = *waiting_[index];
    if (try_admit(request)) {
      pending += request.scheduled().prompt_tokens;
      move_request(waiting_, index, running_);
    } else if (running_.empty()) {
      outputs.push_back(end(request, FinishReason::error,
                            "[engine] the KV pages are held by sequences outside of requests"));
      publish();
    } else {
      return;
    }
  }
}

// Gives a request its cached prefix when the pages for all its tokens, and those that running
// requests still need for theirs, are there.
bool EngineCore::try_admit(Request& request) {
  int32_t cached = 0;
  const std::span<const int32_t> known = request.tokens;
  const SequenceId sequence =
      cache_->create(options_.prefix_cache ? known : known.first(0), &cached);
  const auto missing = [&](size_t tokens, SequenceId id) {
    return std::max<int64_t>(0, static_cast<int64_t>(KvCache::pages_for(tokens)) -
                                    static_cast<int64_t>(cache_->pages(id).size()));
  };
  int64_t needed = missing(request.tokens.size() + 1, sequence);
  for (const auto& other : running_) needed += missing(other->tokens.size(), other->sequence);
  if (needed > cache_->available_pages()) {
    cache_->release(sequence, false);
    return false;
  }
  cache_->reserve(sequence, static_cast<int64_t>(request.tokens.capacity()) + Draft::kMostNodes);
  request.sequence = sequence;
  request.fed = static_cast<size_t>(cached);
  if (request.metrics.preemptions == 0) request.metrics.cached_tokens = cached;
  request.changed = true;
  return true;
}

// Preempts until `count` tokens fit; false when that takes the sequence's own request, or when
// nobody is left to take from.
bool EngineCore::make_room(SequenceId sequence, int64_t count) {
  while (!cache_->can_append(sequence, count)) {
    const auto others = [&](const auto& r) { return r->sequence != sequence; };
    if (std::none_of(running_.begin(), running_.end(), others)) return false;
    const size_t victim = checked_index(policy_->preempt(scheduled(running_)), running_.size());
    const bool own = running_[victim]->sequence == sequence;
    preempt(victim);
    if (own) return false;
  }
  return true;
}

// Takes a request's pages. Nothing is lost: its tokens, generated ones included, are fed again when
// it is admitted, in the phases that they had before, so that its text does not change.
void EngineCore::preempt(size_t index) {
  Request& request = *running_[index];
  cache_->release(request.sequence, options_.prefix_cache);
  request.sequence = Request::kNoSequence;
  request.fed = 0;
  request.step_tokens = 0;
  ++request.metrics.preemptions;
  request.changed = true;
  move_request(running_, index, waiting_);
  const std::lock_guard lock(mutex_);
  ++stats_.preemptions;
}

}  // namespace effinfer::runtime
