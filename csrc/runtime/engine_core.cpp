#include "runtime/engine_core.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/log.h"
#include "effinfer/error.h"
#include "runtime/key_noise.h"

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
      pool_(runner_->pool()),
      sampler_(runner_->isa()),
      speculator_(options.speculation, {runner_->vocab_size(), runner_->num_ids()},
                  static_cast<size_t>(std::max<int64_t>(options.max_sequences, 1))),
      techniques_(options.techniques, options.hooks,
                  std::min(options.max_batch_tokens, runner_->limits().max_tokens)) {
  require_positive("max_seq_len", options.max_seq_len);
  require_positive("max_batch_tokens", options.max_batch_tokens);
  require_positive("max_sequences", options.max_sequences);
  const StepLimits limits = runner_->limits();
  const int64_t capacity = int64_t{cache_->config().num_pages} * KvCache::kPageSize;
  options_.max_seq_len = std::min(options.max_seq_len, capacity);
  options_.max_batch_tokens = std::min(options.max_batch_tokens, limits.max_tokens);
  options_.max_sequences = std::min({options.max_sequences, limits.max_sequences, limits.max_rows});
  resize_rows(most_rows());
  const auto sequences = static_cast<size_t>(options_.max_sequences);
  batch_.reserve(static_cast<size_t>(limits.max_tokens), sequences,
                 static_cast<size_t>(cache_->config().num_pages),
                 static_cast<size_t>(cache_->num_groups()));
  scheduled_.reserve(sequences);
  choice_.chunks.reserve(sequences);
  active_.reserve(sequences);
  facts_.reserve(sequences);
  ended_.reserve(sequences);
  paths_.resize(sequences + 1);
  for (auto& path : paths_) path.reserve(Draft::kMostNodes);
  kept_.reserve(Draft::kMostNodes + kCatchUpTokens);
  allowed_.resize((static_cast<size_t>(vocab_size()) + 31) / 32);
  take_hooks(options.hooks);
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

void EngineCore::check_request(std::span<const int32_t> prompt,
                               const SamplingParams& params) const {
  params.validate(vocab_size());
  const auto size = static_cast<int64_t>(prompt.size());
  const int64_t most = most_tokens(techniques_.of(params, size)) - (params.max_tokens == 0 ? 0 : 1);
  if (size <= most) return;
  throw InvalidArgument("[engine] prompt: expected at most " + std::to_string(most) +
                        " tokens (the context of the engine, limited by max_seq_len and " +
                        "num_pages, less one to generate), got " + std::to_string(prompt.size()));
}

std::unique_ptr<Request> EngineCore::make_request(std::span<const int32_t> prompt,
                                                  const SamplingParams& params) const {
  auto request = std::make_unique<Request>();
  // Of a text without a limit no more than of others: it grows.
  const auto room = options_.max_seq_len - static_cast<int64_t>(prompt.size());
  const auto more = std::min<int64_t>(params.max_tokens, std::max<int64_t>(room, 0));
  request->tokens.reserve(prompt.size() + static_cast<size_t>(more));
  request->tokens.assign(prompt.begin(), prompt.end());
  request->prompt_size = prompt.size();
  request->params = params;
  request->techniques = techniques_.of(params, static_cast<int64_t>(prompt.size()));
  if (request->scores_prompt()) score_in_chunks(*request);
  request->metrics.speculation.guarantee = speculator_.verifier().guarantee();
  request->metrics.prompt_tokens = static_cast<int64_t>(prompt.size());
  request->added = Request::Clock::now();
  return request;
}

std::vector<RequestId> EngineCore::add_answers(
    std::span<const int32_t> prompt, std::span<const SamplingParams> params,
    std::span<const std::shared_ptr<TokenConstraint>> constraints) {
  if (params.empty()) throw InvalidArgument("[engine] params: expected at least one, got none");
  if (!constraints.empty() && constraints.size() != params.size()) {
    throw InvalidArgument("[engine] constraints: expected none or " +
                          std::to_string(params.size()) + ", got " +
                          std::to_string(constraints.size()));
  }
  check_tokens(prompt, "prompt");
  Requests requests;
  for (const SamplingParams& each : params) {
    check_request(prompt, each);
    requests.push_back(make_request(prompt, each));
  }
  for (size_t i = 0; i < constraints.size(); ++i) requests[i]->constraint = constraints[i];
  std::vector<RequestId> ids;
  const std::lock_guard lock(mutex_);
  const RequestId group = requests.size() > 1 ? next_id_ : 0;
  for (auto& request : requests) {
    request->id = next_id_++;
    // A fork computes the prompt's last token again, alone, with all keys.
    request->group = request->techniques.plain ? group : 0;
    ids.push_back(request->id);
    records_[request->id].metrics = request->metrics;
    incoming_.push_back(std::move(request));
    ++unfinished_;
  }
  return ids;
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
  while (static_cast<int64_t>(running_.size()) < options_.max_sequences &&
         pending < options_.max_batch_tokens) {
    const std::span<const ScheduledRequest> candidates = admissible();
    if (candidates.empty()) return;
    const size_t index = admissible_[checked_index(policy_->admit(candidates), candidates.size())];
    Request& request = *waiting_[index];
    if (try_admit(request)) {
      pending += request.scheduled().prompt_tokens;
      move_request(waiting_, index, running_);
    } else if (drop_prompts()) {
      continue;  // with their pages
    } else if (running_.empty()) {
      outputs.push_back(end(request, FinishReason::error,
                            "[engine] the KV pages are held by sequences outside of requests"));
      publish();
    } else {
      return;
    }
  }
}

// The waiting requests that may run: not an answer to a prompt that another one is computing.
std::span<const ScheduledRequest> EngineCore::admissible() {
  scheduled_.clear();
  admissible_.clear();
  for (size_t i = 0; i < waiting_.size(); ++i) {
    if (waits_for_prompt(*waiting_[i])) continue;
    scheduled_.push_back(waiting_[i]->scheduled());
    admissible_.push_back(i);
  }
  return scheduled_;
}

// For slots that a request would have if nobody dropped any.
size_t EngineCore::pages_of_slots(const Request& request, size_t slots) const {
  if (!is_bounded(request.techniques)) return KvCache::pages_for(slots);
  return KvCache::pages_for(std::min(slots, static_cast<size_t>(request.techniques.peak_slots)));
}

// Pages for so many tokens that are not fed yet, in the group of layers that lacks most.
int64_t EngineCore::missing_pages(const Request& request, size_t more, SequenceId sequence) const {
  int64_t missing = 0;
  for (int32_t group = 0; group < cache_->num_whole_groups(); ++group) {
    const size_t slots = static_cast<size_t>(cache_->slots(sequence, group)) + more;
    missing = std::max(missing, static_cast<int64_t>(pages_of_slots(request, slots)) -
                                    static_cast<int64_t>(cache_->pages(sequence, group).size()));
  }
  return missing;
}

// A fork copies the page that it goes on in.
int64_t EngineCore::copied_pages(const Request& fork, size_t fed) {
  return fork.group != 0 && fed < fork.prompt_size && fed % KvCache::kPageSize != 0 ? 1 : 0;
}

// That running requests still need for their tokens.
int64_t EngineCore::pages_of_running() const {
  int64_t pages = 0;
  for (const auto& other : running_) {
    pages += missing_pages(*other, other->tokens.size() - other->fed, other->sequence) +
             copied_pages(*other, other->fed);
  }
  return pages;
}

// Gives a request that was preempted its sequence again.
bool EngineCore::try_import(Request& request) {
  const auto slots = static_cast<size_t>(request.saved_slots);
  const size_t left = request.tokens.size() - request.fed;
  const auto needed = static_cast<int64_t>(pages_of_slots(request, slots + left));
  if (needed + pages_of_running() > cache_->available_pages()) return false;
  try {
    request.sequence = cache_->import_(request.saved);
  } catch (const OutOfMemory&) {
    return false;  // of the pages of a window
  }
  request.saved = {};
  cache_->reserve(request.sequence,
                  static_cast<int64_t>(request.tokens.capacity()) + Draft::kMostNodes);
  request.changed = true;
  return true;
}

// Gives a request what is known of its tokens when the pages for all of them, and those that
// running requests still need for theirs, are there.
bool EngineCore::try_admit(Request& request) {
  if (!request.saved.empty()) return try_import(request);
  int32_t cached = 0;
  const SequenceId sequence = start_sequence(request, cached);
  const size_t next = request.params.max_tokens == 0 ? 0 : 1;
  const size_t left = request.tokens.size() - static_cast<size_t>(cached) + next;
  const int64_t needed =
      missing_pages(request, left, sequence) + copied_pages(request, static_cast<size_t>(cached));
  if (needed + pages_of_running() > cache_->available_pages()) {
    cache_->release(sequence, false);
    return false;
  }
  cache_->reserve(sequence, static_cast<int64_t>(request.tokens.capacity()) + Draft::kMostNodes);
  if (request.scores_prompt()) make_prompt_rows();
  for (const std::string_view name : request.techniques.planes) cache_->add_plane(sequence, name);
  request.noise_seed = noise_seed(std::span(request.tokens).first(request.prompt_size));
  request.sequence = sequence;
  request.fed = static_cast<size_t>(cached);
  if (request.metrics.preemptions == 0) request.metrics.cached_tokens = cached;
  request.changed = true;
  return true;
}

// Preempts until so many tokens fit; false when that takes the sequence's own request, or when
// nobody is left to take from.
bool EngineCore::make_room(SequenceId sequence, int64_t count) {
  while (!cache_->can_append(sequence, count)) {
    if (!take_pages(sequence)) return false;
  }
  return true;
}

// From prompts that wait for their answers, else from a request.
bool EngineCore::take_pages(SequenceId sequence) {
  if (drop_prompts()) return true;
  const auto others = [&](const auto& r) { return r->sequence != sequence; };
  if (std::none_of(running_.begin(), running_.end(), others)) return false;
  const size_t victim = checked_index(policy_->preempt(scheduled(running_)), running_.size());
  const bool own = running_[victim]->sequence == sequence;
  preempt(victim);
  return !own;
}

// Takes a request's pages. Nothing is lost: its tokens, generated ones included, are fed again when
// it is admitted, in the phases that they had before, so that its text does not change. Where keys
// were dropped that would not give the keys that it had, and what it has is kept beside the pages.
void EngineCore::preempt(size_t index) {
  Request& request = *running_[index];
  if (cache_->is_prefix(request.sequence)) {
    request.fed = 0;
  } else {
    cache_->rollback(request.sequence,
                     cache_->length(request.sequence) - cache_->committed(request.sequence));
    request.saved = cache_->export_(request.sequence);
    request.saved_slots = cache_->most_slots(request.sequence);
  }
  cache_->release(request.sequence, options_.prefix_cache);
  request.sequence = Request::kNoSequence;
  request.step_tokens = 0;
  if (request.saved.empty()) forget_in_hooks(request.id);
  ++request.metrics.preemptions;
  request.changed = true;
  log(LogLevel::debug, "no free pages: a request waits again, preempted " +
                           std::to_string(request.metrics.preemptions) + " times");
  move_request(running_, index, waiting_);
  const std::lock_guard lock(mutex_);
  ++stats_.preemptions;
}

}  // namespace effinfer::runtime
