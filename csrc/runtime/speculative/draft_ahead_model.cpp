// A model as the runner of drafts that are made ahead.
#include <algorithm>
#include <cmath>
#include <memory>
#include <unordered_map>
#include <utility>

#include "effinfer/error.h"
#include "effinfer/placement.h"
#include "runtime/speculative/draft_ahead.h"
#include "runtime/speculative/draft_proposers.h"
#include "runtime/speculative/draft_setup.h"

namespace effinfer::runtime {
namespace {

class ModelRunner final : public DraftRunner {
 public:
  ModelRunner(DraftSetup setup, int32_t width)
      : setup_(std::move(setup)), width_(static_cast<size_t>(width)) {}

  int64_t most_texts() const override { return setup_.steps->max_rows(); }
  int64_t max_seq_len() const override { return setup_.steps->max_seq_len(); }

  void run(std::span<AheadText> texts, const CancelToken& cancel) override {
    DraftSteps& steps = *setup_.steps;
    steps.set_cancel(&cancel);
    fed_.clear();
    answered_.clear();
    for (AheadText& text : texts) {
      DraftText& own = texts_[text.request];
      text.refusal = setup_.trouble(text.tokens, static_cast<int64_t>(text.tokens.size()));
      if (text.refusal.empty() && !steps.align(own, text.tokens)) {
        text.refusal = setup_.out_of_pages();
      }
      if (!text.refusal.empty()) continue;
      fed_.push_back(&own);
      answered_.push_back(&text);
    }
    if (fed_.empty()) return;
    steps.feed(fed_);
    for (size_t i = 0; i < fed_.size(); ++i) answer(steps.top(i), *answered_[i]);
  }

  void release(RequestId request) override {
    const auto found = texts_.find(request);
    if (found == texts_.end()) return;
    setup_.steps->release(found->second);
    texts_.erase(found);
  }

  void start_profile(int64_t max_steps) override {
    setup_.steps->executable().start_profile(max_steps);
  }
  Profile take_profile() override { return setup_.steps->executable().take_profile(); }

 private:
  void answer(const DraftSteps::Top& top, AheadText& text) {
    if (!std::isfinite(top.values.front())) {
      text.refusal = "the draft model's logits hold a NaN or an infinity";
      return;
    }
    const std::span<const int32_t> tokens = setup_.ids_of(top.tokens, room_);
    if (text.params == nullptr) {
      guesser_.find(top.values, tokens, width_, text.likely);
    } else {
      text.firsts = guesser_.find_drawn(
          top.values, tokens, {text.params.get(), text.index, text.spread}, width_, text.likely);
    }
  }

  DraftSetup setup_;
  size_t width_;
  std::unordered_map<RequestId, DraftText> texts_;
  std::vector<DraftText*> fed_;
  std::vector<AheadText*> answered_;
  std::vector<int32_t> room_;  // of ids
  Guesser guesser_;
};

class ModelAhead final : public DraftAhead {
 public:
  ModelAhead(const DraftModelOptions& options, const Placement& placement)
      : DraftAhead({options.length, options.width, options.adaptive, options.label}, placement),
        options_(options) {}

  void bind(Executable& target) override {
    if (is_bound_) throw InvalidArgument(std::string(kInUse));
    is_bound_ = true;
    if (target.options().device.kind == DeviceKind::cpu) {
      // The engine's threads have been placed by now: no "cpu" becomes what is left.
      Placement draft = executor().placement();
      if (draft == Placement{}) draft.cores = usable_cores();
      place_apart({{target.options().device, cores_of(*target.pool())}, draft});
    }
    set_runner(std::make_unique<ModelRunner>(set_up_draft(options_, target, &executor(), 1),
                                             options_.width));
  }

 private:
  DraftModelOptions options_;
  bool is_bound_ = false;
};

}  // namespace

std::shared_ptr<Proposer> draft_ahead_proposer(const DraftModelOptions& options) {
  return std::make_shared<ModelAhead>(options,
                                      parse_placement(options.device, "[draft_model] device"));
}

}  // namespace effinfer::runtime
