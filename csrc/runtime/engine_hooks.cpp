// Behind a step: hooks of techniques, for the requests for which something that they wait for has
// happened.
#include <algorithm>
#include <exception>
#include <limits>
#include <string>

#include "core/log.h"
#include "effinfer/error.h"
#include "runtime/engine_core.h"

namespace effinfer {

SequenceState::~SequenceState() = default;
StepHook::~StepHook() = default;

}  // namespace effinfer

namespace effinfer::runtime {
namespace {

class RequestState final : public SequenceState {
 public:
  RequestState(KvCache& cache, const Request& request) : cache_(cache), request_(request) {}
  SequenceId id() const override { return request_.sequence; }
  int64_t length() const override { return cache_.most_slots(request_.sequence); }
  int64_t prompt_tokens() const override { return static_cast<int64_t>(request_.prompt_size); }
  int64_t output_tokens() const override { return static_cast<int64_t>(request_.output().size()); }

  int64_t next_position() const override { return cache_.next_position(request_.sequence); }
  int32_t head_dim() const override { return cache_.config().head_dim; }
  std::span<const int32_t> tokens() const override { return cache_.tokens(request_.sequence); }
  int32_t num_groups() const override { return cache_.num_groups(); }
  int32_t num_whole_groups() const override { return cache_.num_whole_groups(); }
  int32_t num_heads() const override { return first_head(num_whole_groups()); }
  int32_t first_head(int32_t group) const override {
    return static_cast<int32_t>(cache_.first_plane_head(group));
  }
  int64_t slots(int32_t group) const override { return cache_.slots(request_.sequence, group); }
  void retain(int32_t group, std::span<const std::vector<int32_t>> slots) override {
    cache_.retain(request_.sequence, group, slots);
  }
  void reorder(int32_t group, std::span<const std::vector<int32_t>> slots) override {
    cache_.reorder(request_.sequence, group, slots);
  }
  void evict(int32_t group, int64_t begin, int64_t end) override {
    cache_.evict(request_.sequence, group, begin, end);
  }
  void merge(int32_t group, std::span<const KvMerge> merges) override {
    cache_.merge(request_.sequence, group, merges);
  }
  void reposition(std::span<const int64_t> from, int64_t delta) override {
    cache_.reposition(request_.sequence, from, delta);
  }
  SlotPlane plane(std::string_view name) override { return cache_.plane(request_.sequence, name); }
  void read(int32_t group, int32_t head, std::span<float> keys,
            std::span<float> values) const override {
    cache_.read(request_.sequence, group, head, keys, values);
  }

 private:
  KvCache& cache_;
  const Request& request_;
};

bool any(const Triggers& triggers) {
  return triggers.prompt_end || triggers.page_filled || triggers.every != 0 ||
         triggers.over_budget != 0;
}

// A step's tokens of one request: `fed` of the text, the prompt's included, and slots of its
// sequence.
struct Progress {
  int64_t prompt = 0;
  int64_t fed_before = 0;
  int64_t fed = 0;
  int64_t length_before = 0;
  int64_t length = 0;
};

Triggers fired(const Triggers& wanted, const Progress& step) {
  const auto crosses = [](int64_t before, int64_t after, int64_t every) {
    return every > 0 && after / every > before / every;
  };
  const auto generated = [&](int64_t fed) { return std::max<int64_t>(fed - step.prompt, 0); };
  Triggers triggers;
  triggers.prompt_end =
      wanted.prompt_end && step.fed_before < step.prompt && step.fed >= step.prompt;
  triggers.page_filled =
      wanted.page_filled && crosses(step.length_before, step.length, KvCache::kPageSize);
  if (crosses(generated(step.fed_before), generated(step.fed), wanted.every)) {
    triggers.every = wanted.every;
  }
  if (wanted.over_budget > 0 && step.length > wanted.over_budget) {
    triggers.over_budget = wanted.over_budget;
  }
  return triggers;
}

}  // namespace

void EngineCore::take_hooks(const StepHooks& hooks) {
  for (size_t i = 0; i < hooks.size(); ++i) {
    const std::string label = "[engine] hooks[" + std::to_string(i) + "]: expected ";
    if (hooks[i] == nullptr) throw InvalidArgument(label + "a hook, got null");
    const Triggers triggers = hooks[i]->triggers();
    const auto check = [&](const char* trigger, int64_t tokens) {
      if (tokens >= 0) return;
      throw InvalidArgument(label + trigger + " of at least 1 token, or 0, got " +
                            std::to_string(tokens));
    };
    check("every", triggers.every);
    check("over_budget", triggers.over_budget);
    if (!any(triggers)) throw InvalidArgument(label + "a trigger, got none");
    const std::string_view technique = hooks[i]->technique();
    hooks_.push_back(
        {hooks[i], triggers, techniques_.bit(technique), techniques_.is_lossless(technique)});
  }
}

// Of a step that generates, with its first one: behind so many a hook runs, and what later ones see
// may be other keys.
int64_t EngineCore::tokens_until_hook(const Request& request) const {
  const auto generated = static_cast<int64_t>(request.fed - request.prompt_size);
  const int64_t slots = cache_->most_slots(request.sequence) - request.step_tokens;
  int64_t tokens = std::numeric_limits<int64_t>::max();
  for (const Hook& hook : hooks_) {
    if (hook.changes_nothing || !hook.runs_for(request)) continue;
    const Triggers& when = hook.triggers;
    constexpr int64_t kPage = KvCache::kPageSize;
    if (when.page_filled) tokens = std::min(tokens, kPage - slots % kPage);
    if (when.every > 0) tokens = std::min(tokens, when.every - generated % when.every);
    if (when.over_budget > 0) {
      tokens = std::min(tokens, std::max<int64_t>(when.over_budget + 1 - slots, 1));
    }
  }
  return tokens;
}

// After a commit of what was fed from token `first` on. What went wrong, or nothing.
std::string EngineCore::run_hooks(Request& request, size_t first) {
  if (hooks_.empty()) return {};
  RequestState state(*cache_, request);
  const auto count = static_cast<int64_t>(request.fed - first);
  for (const Hook& hook : hooks_) {
    if (!hook.runs_for(request)) continue;
    Progress step;
    step.prompt = static_cast<int64_t>(request.prompt_size);
    step.fed_before = static_cast<int64_t>(first);
    step.fed = static_cast<int64_t>(request.fed);
    step.length = state.length();
    step.length_before = step.length - count;
    const Triggers triggers = fired(hook.triggers, step);
    if (!any(triggers)) continue;
    try {
      hook.hook->run({request.id, triggers, step.length_before, count}, state);
    } catch (const std::exception& failure) {
      const std::string what = failure.what();
      log(LogLevel::warning, "a hook failed: " + what);
      return what.empty() ? "[engine] a hook failed" : what;
    }
  }
  return {};
}

void EngineCore::forget_in_hooks(RequestId id) {
  for (const Hook& hook : hooks_) hook.hook->forget(id);
}

}  // namespace effinfer::runtime
