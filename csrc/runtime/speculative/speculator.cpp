#include "runtime/speculative/speculator.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <set>

#include "effinfer/error.h"
#include "runtime/speculative/calibration.h"

namespace effinfer::runtime {
namespace {

// What went wrong in a call; empty: nothing did.
template <class Call>
std::string failure_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    const std::string what = error.what();
    return what.empty() ? "it failed" : what;
  }
  return {};
}

// The parts that engines have now.
struct Claimed {
  std::mutex mutex;
  std::set<const void*> parts;
};
Claimed& claimed() {
  static Claimed all;
  return all;
}

}  // namespace

std::vector<std::string> wanted_outputs(const Speculation& parts) {
  std::vector<std::string> names;
  for (const auto& proposer : parts.proposers) {
    if (proposer == nullptr) continue;
    for (const std::string& name : proposer->outputs()) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

Speculator::Claim::Claim(const void* part) : part_(part) {
  const std::lock_guard lock(claimed().mutex);
  if (claimed().parts.insert(part).second) return;
  throw InvalidArgument(
      "[speculation] parts: expected proposers, a verifier and a controller of this engine alone, "
      "got one that is in use: it keeps the state of requests, make another");
}

Speculator::Claim::~Claim() {
  if (part_ == nullptr) return;
  const std::lock_guard lock(claimed().mutex);
  claimed().parts.erase(part_);
}

Speculator::Speculator(const Speculation& parts, const DraftIds& ids, size_t max_requests)
    : parts_{parts}, ids_{ids} {
  if (parts_.verifier == nullptr) parts_.verifier = match_verifier();
  if (parts_.controller == nullptr) parts_.controller = cost_controller();
  if (parts_.proposers.size() > Calibration::kSources) {
    throw InvalidArgument("[speculation] proposers: expected at most " +
                          std::to_string(Calibration::kSources) + ", got " +
                          std::to_string(parts_.proposers.size()));
  }
  claim_parts();
  for (const auto& proposer : parts_.proposers) {
    const auto wanted = std::min<int64_t>(proposer->top_k(), ids.vocab);
    top_k_ = std::max(top_k_, static_cast<int32_t>(wanted));
    proposer->attach(ids.vocab);
  }
  // Who asks for distributions looks up each node's token in them.
  if (verifier().needs_distributions()) ids_.all = ids_.vocab;
  outputs_ = wanted_outputs(parts_);
  if (!drafts()) return;
  broken_.resize(parts_.proposers.size() + 1);
  entries_.resize(max_requests);
  drafts_.resize(max_requests);
  for (Entry& entry : entries_) {
    reserve(entry.proposed);
    entry.tree.reserve();
  }
  for (Draft& draft : drafts_) reserve(draft);
  asked_.reserve(max_requests);
  views_.reserve(max_requests);
  keep_.reserve(max_requests);
}

void Speculator::claim_parts() {
  claims_.reserve(parts_.proposers.size() + 2);
  for (const auto& proposer : parts_.proposers) {
    if (proposer == nullptr) throw InvalidArgument("[speculation] proposers: expected no null");
    claims_.emplace_back(proposer.get());
  }
  claims_.emplace_back(parts_.verifier.get());
  claims_.emplace_back(parts_.controller.get());
}

void Speculator::add(const DraftView& view) {
  Entry& entry = entries_.at(count_++);
  entry.view = view;
  entry.view.draws = verifier().needs_probabilities();
  entry.view.same_text = verifier().guarantee() == Guarantee::same_text;
  entry.asked = false;
  entry.keep = 0;
  entry.proposed.clear();
  entry.tree.clear();
  entry.trouble.clear();
}

Speculator::Entry* Speculator::find(RequestId request) {
  for (Entry& entry : entries()) {
    if (entry.view.request == request) return &entry;
  }
  return nullptr;
}

void Speculator::propose(const StepBudget& budget) {
  asked_.clear();
  views_.clear();
  if (broken_.back().why.empty()) {
    broken_.back().why = failure_of([&] { ask_controller(); });
    if (!broken_.back().why.empty()) asked_.clear();
  }
  tell_broken();
  if (asked_.empty()) return;
  for (size_t source = 0; source < parts_.proposers.size(); ++source) {
    ask(static_cast<uint8_t>(source));
  }
  choose(budget);
}

// A warning to each request of the step after a part broke, who decode plainly in it.
void Speculator::tell_broken() {
  for (size_t i = 0; i < broken_.size(); ++i) {
    Broken& broken = broken_[i];
    if (broken.why.empty() || broken.told) continue;
    broken.told = true;
    const bool proposes = i < parts_.proposers.size();
    const std::string name(proposes ? parts_.proposers[i]->name() : parts_.controller->name());
    for (Entry& entry : entries()) {
      entry.trouble = "[speculation] " + name + (proposes ? ": " : " controller: ") + broken.why +
                      "; it is not asked again";
    }
  }
}

void Speculator::ask_controller() {
  for (size_t i = 0; i < count_; ++i) {
    DraftView view = entries_[i].view;
    const int32_t wanted = parts_.controller->budget(view);
    view.max_nodes = std::min({view.max_nodes, wanted, Draft::kMostNodes});
    if (view.max_nodes < 1) continue;
    entries_[i].asked = true;
    asked_.push_back(i);
    views_.push_back(view);
  }
}

void Speculator::ask(uint8_t source) {
  if (!broken_[source].why.empty()) return;
  Proposer& proposer = *parts_.proposers[source];
  const std::span<Draft> drafts = std::span(drafts_).first(asked_.size());
  for (Draft& draft : drafts) draft.clear();
  const std::string failure = failure_of([&] { proposer.propose(views_, drafts); });
  for (size_t i = 0; i < asked_.size(); ++i) {
    Entry& entry = entries_[asked_[i]];
    const DraftView& view = views_[i];
    const std::string trouble =
        failure.empty() ? trouble_of(drafts[i], view.max_nodes, ids_) : failure;
    if (trouble.empty()) {
      add_draft(drafts[i], source, view, entry.proposed);
    } else {
      entry.trouble = "[speculation] " + std::string(proposer.name()) + ": " + trouble;
    }
  }
}

// Drawn nodes are not merged: a verifier has to know what each was drawn from.
void Speculator::add_draft(const Draft& draft, uint8_t source, const DraftView& view,
                           Draft& proposed) {
  const bool drawn = view.draws && draft.draw != Draft::Draw::none;
  if (drawn && proposed.size() == 0) {
    take_drawn(draft, source, view, proposed);
  } else if (!drawn && proposed.draw == Draft::Draw::none) {
    merge(draft, source, view, proposed);
  }
}

void Speculator::choose(const StepBudget& budget) {
  const std::span<Draft> drafts = std::span(drafts_).first(asked_.size());
  for (size_t i = 0; i < asked_.size(); ++i) {
    Entry& entry = entries_[asked_[i]];
    // A request with a refused draft decodes plainly in this step.
    if (!entry.trouble.empty()) entry.proposed.clear();
    std::swap(drafts[i], entry.proposed);
  }
  keep_.assign(asked_.size(), 0);
  broken_.back().why =
      failure_of([&] { parts_.controller->choose(views_, drafts, budget, keep_); });
  if (!broken_.back().why.empty()) keep_.assign(asked_.size(), 0);
  tell_broken();
  int32_t left = budget.draft_rows;
  for (size_t i = 0; i < asked_.size(); ++i) {
    Entry& entry = entries_[asked_[i]];
    std::swap(drafts[i], entry.proposed);
    keep_[i] = with_earlier_siblings(entry.proposed, keep_[i]);
    for (int32_t node = 0; node < entry.proposed.size() && left > 0; ++node) {
      const int32_t parent = entry.proposed.parents[static_cast<size_t>(node)];
      const bool rooted = parent < 0 || (entry.keep >> parent & 1) != 0;
      if (!rooted || (keep_[i] >> node & 1) == 0) continue;
      entry.keep |= uint64_t{1} << node;
      --left;
    }
  }
}

void Speculator::observe(const StepCost& cost, std::span<const StepFacts> facts) {
  if (!drafts()) return;
  for (size_t i = 0; i < parts_.proposers.size(); ++i) {
    if (!broken_[i].why.empty()) continue;
    broken_[i].why = failure_of([&] { parts_.proposers[i]->observe(facts); });
  }
  if (!broken_.back().why.empty()) return;
  broken_.back().why = failure_of([&] { parts_.controller->observe(cost, facts); });
}

void Speculator::forget(RequestId request) {
  for (size_t i = 0; i < parts_.proposers.size(); ++i) {
    const std::string failure = failure_of([&] { parts_.proposers[i]->forget(request); });
    if (!failure.empty()) broken_[i].why = failure;
  }
  const std::string failure = failure_of([&] {
    parts_.controller->forget(request);
    parts_.verifier->forget(request);
  });
  if (!failure.empty() && drafts()) broken_.back().why = failure;
}

}  // namespace effinfer::runtime
