// Drafts of a smaller model: what it believes, level by level.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/philox.h"
#include "effinfer/error.h"
#include "effinfer/speculative.h"
#include "runtime/speculative/draft_proposers.h"
#include "runtime/speculative/draft_setup.h"
#include "runtime/speculative/draft_steps.h"
#include "runtime/speculative/drawing.h"
#include "runtime/speculative/foresight.h"
#include "runtime/speculative/pace.h"

namespace effinfer {
namespace {

using runtime::DraftSteps;
using runtime::DraftText;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class DraftModelProposer final : public Proposer {
 public:
  explicit DraftModelProposer(const DraftModelOptions& options) : options_(options) {
    runtime::check_options(options);
  }

  std::string_view name() const override { return options_.label; }
  std::vector<std::string> outputs() const override {
    if (options_.hidden.empty()) return {};
    return {options_.hidden};
  }

  void bind(Executable& target) override {
    if (steps_ != nullptr) throw InvalidArgument(std::string(runtime::kInUse));
    setup_ = runtime::set_up_draft(options_, target, nullptr, options_.width);
    steps_ = setup_.steps.get();
  }

  void attach(int64_t vocab_size) override {
    vocab_size_ = vocab_size;
    if (steps_ == nullptr) throw InvalidArgument("[draft_model] expected an engine of a model");
  }

  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    const Clock::time_point begun = Clock::now();
    begin(views, drafts);
    if (!works_.empty()) {
      feed();
      for (int32_t level = 1; !growing_.empty(); ++level) {
        const Clock::time_point start = Clock::now();
        if (!add_level(level)) break;
        steps_->grow(texts_);
        read_level();
        pace_.add_level(seconds_since(start));
      }
      for (Work& work : works_) finish(work);
    }
    asked_ = true;
    proposed_ = Clock::now();
    const std::chrono::duration<double> drafting = proposed_ - begun;
    pace_.add_draft(works_.empty() ? 0.0 : drafting.count());
  }

  void observe(std::span<const StepFacts> facts) override {
    bool any = false;
    for (const StepFacts& fact : facts) {
      any = count(fact) || any;
      if (options_.hidden.empty()) continue;
      State& state = states_[fact.request];
      if (!state.gone) steps_->observe(fact, state.text);
    }
    // A step whose begin nobody told is no longer than the last one that was told, nor than what
    // has gone by.
    const bool told = std::exchange(asked_, false);
    double seconds = seconds_since(told ? proposed_ : observed_);
    if (told) step_seconds_ = seconds;
    seconds = std::min(seconds, step_seconds_);
    pace_.add_step(seconds, any);
    observed_ = Clock::now();
  }

  void forget(RequestId request) override {
    const auto found = states_.find(request);
    if (found == states_.end()) return;
    steps_->release(found->second.text);
    states_.erase(found);
  }

 private:
  struct State {
    DraftText text;
    bool gone = false;  // it is not drafted for any more
    // Of its last draft; none: it was not asked.
    std::vector<int32_t> tokens, parents;
    std::vector<float> scores;                         // none where tokens were drawn
    std::optional<runtime::Foresight::Firsts> firsts;  // behind the text, where it foresaw them
  };
  struct Node {
    int32_t token;
    int32_t parent;  // a node; -1: the text's last token
    int32_t depth;
    float score;
    float path;
    int32_t row = -1;  // of DraftText, once it was fed
  };
  // A request in this call.
  struct Work {
    const DraftView* view = nullptr;
    Draft* draft = nullptr;
    State* state = nullptr;
    int32_t depth = 0;  // to reach
    std::vector<Node> nodes;
    std::vector<int32_t> fed;  // nodes of the last level, in the order of their rows
  };

  // Nobody pays a row for less, nor a level of the draft model.
  static constexpr float kLeastPath = 0.02f;

  void begin(std::span<const DraftView> views, std::span<Draft> drafts) {
    works_.clear();
    const int32_t depth = options_.adaptive ? pace_.depth(options_.length) : options_.length;
    for (size_t i = 0; i < views.size() && depth > 0; ++i) {
      State& state = states_[views[i].request];
      if (state.gone || !steps_->knows(state.text, views[i].tokens)) continue;
      const auto size = static_cast<int64_t>(views[i].tokens.size());
      const int64_t room = steps_->max_seq_len() - size;
      const std::span<const int32_t> fresh = views[i].tokens.subspan(
          state.text.sequence < 0
              ? 0
              : static_cast<size_t>(steps_->cache().committed(state.text.sequence)));
      if (const std::string trouble = setup_.trouble(fresh, size); !trouble.empty()) {
        give_up(state, drafts[i], trouble);
      } else if (!steps_->follow(state.text, views[i].tokens)) {
        give_up(state, drafts[i], setup_.out_of_pages());
      } else {
        Work work;
        work.view = &views[i];
        work.draft = &drafts[i];
        work.state = &state;
        work.depth = std::min(
            {depth, views[i].max_depth, static_cast<int32_t>(std::min<int64_t>(room, depth))});
        works_.push_back(std::move(work));
      }
    }
  }

  void give_up(State& state, Draft& draft, const std::string& why) {
    draft.clear();
    draft.refusal = why + "; the request goes on without its drafts";
    state.gone = true;
    steps_->release(state.text);
  }

  // Texts up to their last tokens, and what the model believes to follow.
  void feed() {
    texts_.clear();
    growing_.clear();
    for (Work& work : works_) texts_.push_back(&work.state->text);
    steps_->feed(texts_);
    for (size_t i = 0; i < works_.size(); ++i) {
      if (offer(works_[i], -1, steps_->top(i))) growing_.push_back(&works_[i]);
    }
  }

  // Adds the children of a node. False: the request gives up.
  bool offer(Work& work, int32_t node, const DraftSteps::Top& top) {
    if (!std::isfinite(top.values.front())) {
      give_up(*work.state, *work.draft, "the draft model's logits hold a NaN or an infinity");
      work.nodes.clear();
      return false;
    }
    const std::span<const int32_t> tokens = setup_.ids_of(top.tokens, room_);
    if (work.view->draws) {
      draw(work, node, top.values, tokens);
      return true;
    }
    const Node parent =
        node < 0 ? Node{0, -1, 0, 1.0f, 1.0f} : work.nodes[static_cast<size_t>(node)];
    find_likely(work, parent.depth, top.values, tokens);
    for (const runtime::Likely& likely : likely_) {
      const float path = parent.path * pace_.belief(likely.score);
      if (likely.token >= vocab_size_ || path < kLeastPath) continue;
      work.nodes.push_back({likely.token, node, parent.depth + 1, likely.score, path});
    }
    return true;
  }

  // What is likely to follow, so many guesses behind the text.
  void find_likely(Work& work, int32_t depth, std::span<const float> logits,
                   std::span<const int32_t> tokens) {
    const auto width = static_cast<size_t>(options_.width);
    const DraftView& view = *work.view;
    if (!view.same_text || view.params->temperature == 0.0f) {
      guesser_.find(logits, tokens, width, likely_);
      return;
    }
    const size_t index = view.tokens.size() - view.prompt_size + static_cast<size_t>(depth);
    const auto firsts = guesser_.find_drawn(logits, tokens, {view.params, index, foresight_.best()},
                                            width, likely_);
    if (depth == 0) work.state->firsts = firsts;
  }

  // The last token has `width` children, others one each: the shape does not depend on what is
  // drawn.
  void draw(Work& work, int32_t node, std::span<const float> logits,
            std::span<const int32_t> tokens) {
    Draft& draft = *work.draft;
    draft.draw = Draft::Draw::without_replacement;
    runtime::find_candidates(logits, tokens, *work.view->params, candidates_);
    const bool unknown = std::any_of(candidates_.begin(), candidates_.end(),
                                     [&](const auto& c) { return c.token >= vocab_size_; });
    if (unknown) return;
    draft.set_candidates(node + 1, candidates_);
    std::vector<int32_t> siblings;
    const int32_t depth = node < 0 ? 1 : work.nodes[static_cast<size_t>(node)].depth + 1;
    for (int32_t i = 0; i < (node < 0 ? options_.width : 1); ++i) {
      if (draft.size() >= work.view->max_nodes) return;
      if (siblings.size() == candidates_.size()) return;
      const size_t index = work.view->tokens.size() - work.view->prompt_size;
      const double uniform =
          philox_uniform(work.view->params->seed, index, 1, static_cast<uint32_t>(draft.size()));
      const int32_t token = runtime::draw_child(candidates_, draft.draw, siblings, uniform);
      siblings.push_back(token);
      draft.add(token, node, 0.5f);
      work.nodes.push_back({token, node, depth, 1.0f, 1.0f});
    }
  }

  // Makes rows of the nodes of a level that get children. False: nobody does.
  bool add_level(int32_t level) {
    texts_.clear();
    int64_t rows = 0;
    std::erase_if(growing_, [&](Work* work) {
      work->fed.clear();
      if (level >= work->depth) return true;
      std::vector<int32_t> nodes;
      const bool any = work->view->draws || !options_.adaptive;
      for (int32_t i = 0; i < static_cast<int32_t>(work->nodes.size()); ++i) {
        const Node& node = work->nodes[static_cast<size_t>(i)];
        if (node.depth == level && (any || pace_.pays(node.path))) nodes.push_back(i);
      }
      std::stable_sort(nodes.begin(), nodes.end(), [&](int32_t a, int32_t b) {
        return work->nodes[static_cast<size_t>(a)].path > work->nodes[static_cast<size_t>(b)].path;
      });
      if (nodes.size() > static_cast<size_t>(options_.width)) {
        nodes.resize(static_cast<size_t>(options_.width));
      }
      for (const int32_t index : nodes) {
        Node& node = work->nodes[static_cast<size_t>(index)];
        const int32_t above =
            node.parent < 0 ? -1 : work->nodes[static_cast<size_t>(node.parent)].row;
        node.row = static_cast<int32_t>(work->state->text.rows.size());
        // Without a page or a row the draft is shorter.
        if (rows == steps_->max_rows() || !steps_->add(work->state->text, node.token, above)) break;
        ++rows;
        work->fed.push_back(index);
      }
      return work->fed.empty();
    });
    for (Work* work : growing_) texts_.push_back(&work->state->text);
    return !growing_.empty();
  }

  void read_level() {
    size_t row = 0;
    std::erase_if(growing_, [&](Work* work) {
      bool goes_on = true;
      for (const int32_t node : work->fed) {
        const DraftSteps::Top top = steps_->top(row++);
        goes_on = goes_on && offer(*work, node, top);
      }
      return !goes_on;
    });
  }

  // The likeliest nodes, parents first: a path never gets likelier.
  void finish(Work& work) {
    State& state = *work.state;
    if (!work.view->draws && !state.gone) {
      std::vector<int32_t> order(work.nodes.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
      const auto path = [&](int32_t i) { return work.nodes[static_cast<size_t>(i)].path; };
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return path(a) > path(b); });
      std::vector<int32_t> places(order.size(), -1);
      for (const int32_t i : order) {
        const Node& node = work.nodes[static_cast<size_t>(i)];
        if (work.draft->size() >= work.view->max_nodes) break;
        const int32_t parent = node.parent < 0 ? -1 : places[static_cast<size_t>(node.parent)];
        places[static_cast<size_t>(i)] = work.draft->add(node.token, parent, node.score);
      }
    }
    state.tokens = work.draft->tokens;
    state.parents = work.draft->parents;
    state.scores = work.view->draws ? std::vector<float>() : work.draft->scores;
  }

  // How deep the text followed the request's draft, if there was one.
  bool count(const StepFacts& fact) {
    const auto found = states_.find(fact.request);
    if (found == states_.end()) return false;
    State& state = found->second;
    const std::span<const int32_t> emitted = fact.tokens.last(fact.num_emitted);
    if (state.firsts) foresight_.count(*state.firsts, emitted.front());
    state.firsts.reset();
    if (state.tokens.empty()) return false;
    int32_t right = 0;
    int32_t deepest = 0;
    std::vector<int32_t> depths(state.tokens.size());
    std::vector<bool> came(state.tokens.size());  // along the text
    int32_t at = -1;
    for (size_t i = 0; i < state.tokens.size(); ++i) {
      const int32_t parent = state.parents[i];
      depths[i] = parent < 0 ? 1 : depths[static_cast<size_t>(parent)] + 1;
      deepest = std::max(deepest, depths[i]);
      const auto place = static_cast<size_t>(depths[i]) - 1;
      const bool known =
          place < emitted.size() && (parent < 0 || came[static_cast<size_t>(parent)]);
      came[i] = known && state.tokens[i] == emitted[place];
      if (known && !state.scores.empty()) pace_.count_guess(state.scores[i], came[i]);
      const bool follows = parent == at && came[i];
      if (!follows) continue;
      at = static_cast<int32_t>(i);
      ++right;
    }
    // Beyond the last emitted token nobody knows.
    pace_.count(std::min(deepest, static_cast<int32_t>(emitted.size())), right);
    state.tokens.clear();
    state.parents.clear();
    return true;
  }

  DraftModelOptions options_;
  runtime::DraftSetup setup_;
  DraftSteps* steps_ = nullptr;  // its
  int64_t vocab_size_ = 0;
  runtime::Pace pace_;
  runtime::Foresight foresight_;
  bool asked_ = false;  // for drafts, in this step
  Clock::time_point proposed_;
  Clock::time_point observed_;
  double step_seconds_ = 0.0;
  std::unordered_map<RequestId, State> states_;
  // Of the call at hand.
  std::vector<Work> works_;
  std::vector<Work*> growing_;
  std::vector<DraftText*> texts_;
  std::vector<int32_t> room_;  // of ids
  std::vector<Draft::Candidate> candidates_;
  runtime::Guesser guesser_;
  std::vector<runtime::Likely> likely_;
};

}  // namespace

std::shared_ptr<Proposer> draft_model_proposer(const DraftModelOptions& options) {
  if (options.device.empty()) return std::make_shared<DraftModelProposer>(options);
  runtime::check_options(options);
  return runtime::draft_ahead_proposer(options);
}

}  // namespace effinfer
