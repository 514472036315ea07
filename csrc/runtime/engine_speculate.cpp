// Drafts in a step of the engine: they take room that is left, and everybody learns what they gave.
#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "runtime/engine_core.h"

namespace effinfer::runtime {
namespace {

// Rows of drafts in a step, over all requests.
constexpr int64_t kMostDraftRows = 96;

// Of the kept nodes that descend from `parent`, those that the constraint allows behind it; probes
// whose ids are no tokens' are never text.
uint64_t allowed_nodes(const Draft& draft, uint64_t keep, int32_t parent, int64_t vocab,
                       TokenConstraint& constraint) {
  uint64_t allowed = 0;
  for (int32_t node = parent + 1; node < draft.size(); ++node) {
    const auto at = static_cast<size_t>(node);
    if (draft.parents[at] != parent || (keep >> node & 1) == 0) continue;
    const bool is_token = draft.tokens[at] < vocab;
    if (is_token && !constraint.accept(draft.tokens[at])) continue;
    allowed |= uint64_t{1} << node | allowed_nodes(draft, keep, node, vocab, constraint);
    if (is_token) constraint.rollback(1);
  }
  return allowed;
}

}  // namespace

int64_t EngineCore::most_rows() const {
  const int64_t drafts = speculator_.drafts() ? kMostDraftRows : 0;
  return std::min(runner_->limits().max_rows, options_.max_sequences + drafts);
}

// A request drafts when this step's only row of it is to give a generated token. Mirostat's bound
// moves with each token, and what rows of drafts attend to shall not be summed.
bool EngineCore::may_draft(const Request& request) const {
  const bool is_wanted = request.params.speculation && request.params.mirostat == 0 &&
                         !request.techniques.scores_output;
  return is_wanted && request.step_tokens == 1 && request.samples() &&
         request.fed >= request.prompt_size && has_aligned_slots(request.sequence);
}

// Whether its next slot is at one place of a page in all tables: a tree's rows are where plain
// decoding's would be, in a page (plant).
bool EngineCore::has_aligned_slots(SequenceId sequence) const {
  const int64_t first = cache_->slots(sequence);
  for (int32_t group = 1; group < cache_->num_whole_groups(); ++group) {
    if ((cache_->slots(sequence, group) - first) % KvCache::kPageSize != 0) return false;
  }
  return true;
}

// Asks for drafts and appends what gets a row. Drafts take free pages only, and the rows that the
// step has left.
void EngineCore::append_drafts() {
  speculator_.clear();
  facts_.clear();
  if (!speculator_.drafts()) return;
  int64_t tokens = 0;
  StepBudget budget;
  for (const auto& request : running_) {
    if (request->step_tokens == 0) continue;
    tokens += request->step_tokens;
    budget.plain_rows += static_cast<int32_t>(request->step_tokens);
    budget.kv_tokens += cache_->most_slots(request->sequence);
    budget.requests += request->samples() ? 1 : 0;
    if (!may_draft(*request)) continue;
    const int64_t room = is_bounded(request->techniques)
                             ? options_.max_seq_len - cache_->most_slots(request->sequence)
                             : options_.max_seq_len - static_cast<int64_t>(request->tokens.size());
    const int64_t wanted = request->params.max_tokens - request->metrics.output_tokens;
    const auto depth = static_cast<int32_t>(
        std::min({room, wanted, tokens_until_hook(*request), rows_of_one_state(*request)}) - 1);
    if (depth < 1) continue;
    speculator_.add({request->id, request->tokens, request->prompt_size, &request->params,
                     static_cast<int32_t>(std::min<int64_t>(room, Draft::kMostNodes)), depth});
  }
  budget.draft_rows = static_cast<int32_t>(
      std::min({kMostDraftRows, runner_->limits().max_tokens - tokens, free_rows()}));
  if (speculator_.entries().empty() || budget.draft_rows < 1) return;
  speculator_.propose(budget);
  for (const auto& request : running_) {
    Speculator::Entry* entry = speculator_.find(request->id);
    if (entry != nullptr) append_draft(*request, *entry);
  }
}

void EngineCore::append_draft(Request& request, Speculator::Entry& entry) {
  if (!entry.trouble.empty()) {
    SpeculationMetrics& metrics = request.metrics.speculation;
    if (metrics.refused_drafts++ == 0) request.warning = std::move(entry.trouble);
    request.changed = true;
  }
  // A drawn node that may not come gets its row all the same: the verifier refuses it by its rules.
  if (request.constraint != nullptr && entry.proposed.draw == Draft::Draw::none) {
    try {
      entry.keep = allowed_nodes(entry.proposed, entry.keep, -1, vocab_size(), *request.constraint);
    } catch (const std::exception& failure) {
      request.failure = failure.what();
      return;
    }
  }
  if (entry.keep == 0) return;
  const int64_t slots = cache_->slots(request.sequence);
  plant(entry.proposed, entry.keep, {slots - 1, KvCache::kPageSize}, entry.tree);
  entry.tree.cut(static_cast<size_t>(cache_->free_slots(request.sequence)));
  if (entry.tree.draft.tokens.empty()) return;
  cache_->append(request.sequence, entry.tree.draft.tokens);
  request.drafts = &entry.tree;
}

// Takes the drafts out of the step again; whether there were any.
bool EngineCore::drop_drafts() {
  bool any = false;
  for (const auto& request : running_) {
    if (request->drafts == nullptr) continue;
    cache_->rollback(request->sequence, request->drafts->draft.size());
    request->drafts = nullptr;
    any = true;
  }
  return any;
}

void EngineCore::count_drafts(Request& request, std::span<const int32_t> accepted) {
  if (request.drafts == nullptr) return;
  SpeculationMetrics& metrics = request.metrics.speculation;
  const std::vector<int32_t>& depths = request.drafts->depths;
  const auto bucket = [&](size_t row) {
    return std::min(static_cast<size_t>(depths[row]), SpeculationMetrics::kDepths) - 1;
  };
  ++metrics.steps;
  metrics.drafted += request.drafts->draft.size();
  metrics.accepted += static_cast<int64_t>(accepted.size());
  for (size_t row = 1; row < depths.size(); ++row) ++metrics.drafted_at[bucket(row)];
  for (const int32_t node : accepted) {
    ++metrics.accepted_at[bucket(static_cast<size_t>(node) + 1)];
  }
}

// What proposers and the controller are told of a request when the step has ended.
void EngineCore::add_facts(const Request& request, size_t num_emitted,
                           std::span<const int32_t> accepted, size_t row) {
  if (!speculator_.drafts() || !request.params.speculation || num_emitted == 0) return;
  StepFacts facts;
  facts.request = request.id;
  facts.tokens = request.tokens;
  facts.prompt_size = request.prompt_size;
  facts.num_emitted = num_emitted;
  facts.accepted = accepted;
  const Speculator::Entry* entry = speculator_.find(request.id);
  if (entry != nullptr) facts.proposed = &entry->proposed;
  if (request.drafts != nullptr) facts.verified = &request.drafts->draft;
  // Where all logits were computed the highest have to be found, which a request that nobody drafts
  // for now is not worth.
  const bool wanted = top_k_ > 0 || entry == nullptr || entry->asked;
  if (wanted) facts.top = top_of(row, request.num_rows());
  facts.outputs = outputs_;
  facts.first_row = row;
  facts_.push_back(facts);
}

// The highest logits of these rows, where somebody wants to see them.
TopLogits EngineCore::top_of(size_t row, size_t rows) {
  const auto k = static_cast<size_t>(top_k_ > 0 ? top_k_ : speculator_.top_k());
  if (speculator_.top_k() == 0) return {};
  if (top_k_ == 0) {
    const auto vocab = static_cast<size_t>(vocab_size());
    for (size_t r = row; r < row + rows; ++r) {
      sampler_.highest({logits_.get() + r * vocab, vocab}, std::span(top_values_).subspan(r * k, k),
                       std::span(top_tokens_).subspan(r * k, k));
    }
  }
  return {static_cast<int32_t>(k), std::span(top_values_).subspan(row * k, rows * k),
          std::span(top_tokens_).subspan(row * k, rows * k)};
}

void EngineCore::tell_speculator(Phase phase, double propose_seconds, double seconds) {
  if (!speculator_.drafts()) return;
  StepCost cost;
  cost.rows = static_cast<int32_t>(batch_.num_tokens());
  cost.draft_rows = 0;
  for (const Speculator::Entry& entry : speculator_.entries()) {
    cost.draft_rows += entry.tree.draft.size();
  }
  cost.kv_tokens = batch_.kv_tokens();
  cost.seconds = seconds;
  cost.propose_seconds = propose_seconds;
  cost.decoding = phase == Phase::decode && cost.rows > 0;
  if (!facts_.empty()) speculator_.observe(cost, facts_);
}

// After the step's facts, which may be of requests that ended.
void EngineCore::forget_ended() {
  for (const RequestId id : ended_) {
    speculator_.forget(id);
    forget_in_hooks(id);
  }
  ended_.clear();
}

}  // namespace effinfer::runtime
