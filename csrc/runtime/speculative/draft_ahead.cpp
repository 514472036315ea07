#include "runtime/speculative/draft_ahead.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "effinfer/error.h"

namespace effinfer::runtime {
namespace {

// Nobody pays a row for less, nor the memory's bandwidth, which drafts share with the target.
constexpr float kLeastPath = 0.02f;

// Steps without being asked after which a request is not drafted for: the controller asks every
// 16th step where drafts were of no use.
constexpr int32_t kMostUnasked = 32;

double blend(double old, double fresh) {
  return old == 0.0 ? fresh : 0.9 * old + 0.1 * fresh;
}

}  // namespace

DraftAhead::DraftAhead(const AheadOptions& options, const Placement& placement)
    : options_(options), label_(options.label + " on " + effinfer::name(placement)) {
  executor_ = std::make_unique<JobExecutor>(placement);
  stats_.name = options.label;
  stats_.device = effinfer::name(placement);
}

DraftAhead::~DraftAhead() {
  executor_.reset();
}

void DraftAhead::set_runner(std::unique_ptr<DraftRunner> runner) {
  runner_ = std::move(runner);
}

void DraftAhead::attach(int64_t vocab_size) {
  vocab_size_ = vocab_size;
  if (runner_ == nullptr) throw InvalidArgument("[draft_model] expected an engine of a model");
}

// What came is part of the text. Where it is not what was guessed, all behind it is void.
void DraftAhead::follow(Request& request, std::span<const int32_t> tokens) {
  for (size_t i = request.tokens.size(); i < tokens.size(); ++i) {
    request.tokens.push_back(tokens[i]);
    if (request.chain.empty()) continue;
    const Level& level = request.chain.front();
    for (const Likely& guess : level.likely) {
      pace_.count_guess(guess.score, guess.token == tokens[i]);
    }
    if (level.firsts) foresight_.count(*level.firsts, tokens[i]);
    const bool right = level.likely.front().token == tokens[i];
    right_ = 0.98 * right_ + (right ? 0.02 : 0.0);
    if (right) {
      request.chain.pop_front();
    } else {
      request.chain.clear();
      ++request.turn;
    }
  }
}

void DraftAhead::fill(const Request& request, const DraftView& view, Draft& draft) const {
  int32_t parent = -1;
  const auto depth = static_cast<size_t>(std::min(options_.length, view.max_depth));
  for (size_t d = 0; d < std::min(depth, request.chain.size()); ++d) {
    const int32_t above = parent;
    for (const Likely& guess : request.chain[d].likely) {
      if (draft.size() >= view.max_nodes) return;
      const int32_t node = draft.add(guess.token, above, guess.score);
      if (above == parent) parent = node;
    }
  }
}

void DraftAhead::propose(std::span<const DraftView> views, std::span<Draft> drafts) {
  std::unique_lock lock(mutex_);
  if (failed_) return;
  asked_ = Clock::now();
  for (const DraftView& view : views) {
    Request& request = requests_[view.request];
    follow(request, view.tokens);
    request.unasked = 0;
    request.end = view.tokens.size() + static_cast<size_t>(view.max_depth);
    if (request.params == nullptr && view.same_text && view.params->temperature > 0.0f) {
      request.params = std::make_shared<const SamplingParams>(*view.params);
      request.prompt_size = view.prompt_size;
    }
  }
  kick();
  wait(lock, views);
  for (size_t i = 0; i < views.size(); ++i) {
    Request& request = requests_[views[i].request];
    drafts[i].refusal = std::exchange(request.refusal, {});
    if (request.gone) continue;
    fill(request, views[i], drafts[i]);
    ++stats_.asked;
    stats_.late += request.chain.empty() ? 1 : 0;
  }
}

// The probability that the text will follow the chain to its end.
float DraftAhead::path(const Request& request) const {
  float path = 1.0f;
  for (const Level& level : request.chain) path *= pace_.belief(level.likely.front().score);
  return path;
}

// Whether one more level brings half of the requests more tokens a second than they have had.
bool DraftAhead::pays_to_wait(std::span<const DraftView> views) const {
  if (failed_ || level_s_ == 0.0 || rate_ == 0.0) return false;
  size_t gaining = 0;
  for (const DraftView& view : views) {
    const Request& request = requests_.at(view.request);
    const auto depth = static_cast<size_t>(std::min(options_.length, view.max_depth));
    if (!request.read || request.chain.size() >= depth || !wants_more(request)) continue;
    const double gain = static_cast<double>(path(request)) * right_;
    gaining += gain >= level_s_ * rate_ ? 1 : 0;
  }
  return gaining > 0 && 2 * gaining >= views.size();
}

// A level that takes twice its time is not waited for.
void DraftAhead::wait(std::unique_lock<std::mutex>& lock, std::span<const DraftView> views) {
  if (!options_.adaptive) return;
  while (pays_to_wait(views)) {
    const int64_t seen = stats_.levels;
    const std::chrono::duration<double> most(2.0 * level_s_);
    const auto has_grown = [&] { return failed_ || stats_.levels > seen; };
    if (!grown_.wait_for(lock, most, has_grown)) return;
  }
}

void DraftAhead::observe(std::span<const StepFacts> facts) {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw Error(std::exchange(failure_, {}));
  if (failed_) return;
  size_t tokens = 0;
  for (const StepFacts& fact : facts) {
    tokens += fact.num_emitted;
    const auto found = requests_.find(fact.request);
    if (found == requests_.end()) continue;
    ++found->second.unasked;
    follow(found->second, fact.tokens);
  }
  if (asked_ && !facts.empty()) {
    const std::chrono::duration<double> took = Clock::now() - *asked_;
    const double each = static_cast<double>(tokens) / static_cast<double>(facts.size());
    rate_ = blend(rate_, each / took.count());
  }
  asked_.reset();
  if (is_void_level()) stop();
  kick();
}

void DraftAhead::forget(RequestId request) {
  const std::lock_guard lock(mutex_);
  if (requests_.erase(request) == 0 || failed_) return;
  released_.push_back(request);
  if (is_void_level()) stop();
  kick();
}

// Whether the level that the drafter is in is wrong for half of its requests: one that is right for
// most of them is worth its end.
bool DraftAhead::is_void_level() const {
  const auto is_void = [&](const Member& member) {
    const auto found = requests_.find(member.request);
    return found == requests_.end() || found->second.turn != member.turn;
  };
  const auto wrong = std::count_if(level_.begin(), level_.end(), is_void);
  return wrong > 0 && 2 * static_cast<size_t>(wrong) >= level_.size();
}

bool DraftAhead::wants_more(const Request& request) const {
  const size_t most = 2 * static_cast<size_t>(options_.length) + 1;
  if (request.gone || request.unasked > kMostUnasked || request.chain.size() >= most) return false;
  // A text that has outgrown the runner's context is refused by it.
  const auto context = static_cast<size_t>(runner_->max_seq_len());
  const size_t end = request.chain.empty() ? request.end : std::min(request.end, context);
  if (request.tokens.size() + request.chain.size() >= end) return false;
  return !options_.adaptive || path(request) >= kLeastPath;
}

bool DraftAhead::has_work() const {
  return !released_.empty() || std::any_of(requests_.begin(), requests_.end(),
                                           [&](const auto& r) { return wants_more(r.second); });
}

void DraftAhead::kick() {
  if (busy_ || failed_ || !has_work()) return;
  busy_ = true;
  ticket_ =
      executor_->submit([this, job = ++job_](const CancelToken& cancel) { work(job, cancel); });
}

// The job ends after the kernel that it is in.
void DraftAhead::stop() {
  ticket_.cancel();
  ++job_;
  busy_ = false;
  level_.clear();
}

// The texts of the next level; false: the job ends.
bool DraftAhead::take_texts(uint64_t job, std::vector<AheadText>& texts) {
  texts.clear();
  if (job != job_) return false;
  level_.clear();
  level_reads_ = false;
  for (const auto& [id, request] : requests_) {
    if (!wants_more(request)) continue;
    AheadText text;
    text.request = id;
    text.tokens = request.tokens;
    for (const Level& level : request.chain) text.tokens.push_back(level.likely.front().token);
    text.params = request.params;
    text.index = text.tokens.size() - request.prompt_size;
    text.spread = foresight_.best();
    level_reads_ = level_reads_ || !request.read;
    level_.push_back({id, request.turn});
    texts.push_back(std::move(text));
    if (static_cast<int64_t>(texts.size()) == runner_->most_texts()) break;
  }
  busy_ = !texts.empty() || !released_.empty();
  return busy_;
}

void DraftAhead::keep_answers(std::vector<AheadText>& texts, double seconds) {
  ++stats_.levels;
  if (!level_reads_) level_s_ = blend(level_s_, seconds);
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto found = requests_.find(texts[i].request);
    if (found == requests_.end() || found->second.turn != level_[i].turn) continue;
    Request& request = found->second;
    request.read = true;
    if (!texts[i].refusal.empty()) {
      request.refusal = std::move(texts[i].refusal) + "; the request goes on without its drafts";
      request.gone = true;
      request.chain.clear();
      released_.push_back(texts[i].request);
      continue;
    }
    // Where the text has got longer by a token that nobody had guessed, this guess is late.
    if (texts[i].tokens.size() != request.tokens.size() + request.chain.size()) continue;
    std::vector<Likely>& likely = texts[i].likely;
    std::erase_if(likely, [&](const Likely& guess) { return guess.token >= vocab_size_; });
    if (likely.size() > static_cast<size_t>(options_.width)) {
      likely.resize(static_cast<size_t>(options_.width));
    }
    if (!likely.empty()) request.chain.push_back({std::move(likely), texts[i].firsts});
  }
  level_.clear();
  grown_.notify_all();
}

void DraftAhead::work(uint64_t job, const CancelToken& cancel) {
  std::vector<AheadText> texts;
  std::vector<RequestId> released;
  try {
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        if (failed_) return;  // in the job before, when this one was queued
        released.swap(released_);
      }
      for (const RequestId request : released) runner_->release(request);
      released.clear();
      {
        const std::lock_guard lock(mutex_);
        if (!take_texts(job, texts)) return;
      }
      if (texts.empty()) continue;
      const Clock::time_point begin = Clock::now();
      runner_->run(texts, cancel);
      const std::chrono::duration<double> took = Clock::now() - begin;
      const std::lock_guard lock(mutex_);
      if (job != job_) return;
      keep_answers(texts, took.count());
    }
  } catch (const Cancelled&) {
    const std::lock_guard lock(mutex_);
    ++stats_.cancelled;
    if (job == job_) busy_ = false;
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    const std::string what = error.what();
    failure_ = what.empty() ? "its device failed" : what;
    grown_.notify_all();
  }
}

// On the executor, while nothing is drafted.
void DraftAhead::run_alone(const std::function<void()>& task) {
  {
    const std::lock_guard lock(mutex_);
    stop();
    busy_ = true;  // nobody submits another job
  }
  const auto go_on = [&] {
    const std::lock_guard lock(mutex_);
    busy_ = false;
    kick();
  };
  try {
    executor_->submit([&](const CancelToken&) { task(); }).wait();
  } catch (...) {
    go_on();
    throw;
  }
  go_on();
}

void DraftAhead::start_profile(int64_t target_steps) {
  // A level for each token of a step, and those that are cancelled.
  const int64_t steps = target_steps * (2 * options_.length + 2);
  run_alone([&] { runner_->start_profile(steps); });
}

std::optional<NamedProfile> DraftAhead::take_profile() {
  NamedProfile profile{label_, {}};
  run_alone([&] { profile.profile = runner_->take_profile(); });
  return profile;
}

std::optional<DraftingStats> DraftAhead::drafting() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace effinfer::runtime
