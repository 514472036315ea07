#include "runtime/speculative/head_steps.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "effinfer/error.h"

namespace effinfer::runtime {
namespace {

constexpr const char* kInput = "hidden";
constexpr const char* kState = "state";

// Who is not asked for drafts for longer begins anew: states take memory.
constexpr size_t kMostPending = 256;

bool has_state(const Executable& executable) {
  const auto& names = executable.output_names();
  return std::find(names.begin(), names.end(), kState) != names.end();
}

void check_graph(const Executable& executable, const Executable& first, int64_t cols) {
  const Graph& graph = executable.graph();
  const auto fits = [&](ValueId id) {
    const Value& value = graph.value(id);
    return value.name == kInput && value.dtype == DType::f32 && value.shape[1].value == cols;
  };
  if (std::none_of(graph.inputs.begin(), graph.inputs.end(), fits)) {
    throw InvalidArgument("[draft_model] heads: expected the input %hidden f32[T, " +
                          std::to_string(cols) + "], of the target's hidden size, in " +
                          graph.name);
  }
  if (has_state(executable) && executable.output(kState).cols != cols) {
    throw InvalidArgument("[draft_model] heads: expected a %state of " + std::to_string(cols) +
                          " columns, got " + std::to_string(executable.output(kState).cols));
  }
  const auto tokens = [](const Executable& e) {
    const auto entry = e.graph().metadata.find("logit_tokens");
    return entry == e.graph().metadata.end() ? Attribute() : entry->second;
  };
  if (executable.vocab_size() == first.vocab_size() && tokens(executable) == tokens(first)) return;
  throw InvalidArgument("[draft_model] heads: expected all depths to have the same logit_tokens");
}

bool is_finite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

}  // namespace

HeadSteps::HeadSteps(std::vector<std::shared_ptr<Executable>> by_depth, std::string hidden,
                     int64_t cols, int32_t num_pages, int32_t top_k)
    : DraftSteps(by_depth.front(), num_pages, top_k),
      by_depth_(std::move(by_depth)),
      hidden_(std::move(hidden)),
      cols_(static_cast<size_t>(cols)),
      has_cache_(by_depth_.front()->has_attention()) {
  shares_prefixes_ = false;  // what precedes a text is in its hidden states
  for (const auto& executable : by_depth_) check_graph(*executable, *by_depth_.front(), cols);
}

int64_t HeadSteps::end_of_hidden(const DraftText& text) const {
  return text.first + text.hidden_first + static_cast<int64_t>(text.hidden.size() / cols_);
}

// Each emitted token was drawn from a row: the root's, then those of the accepted nodes.
void HeadSteps::observe(const StepFacts& facts, DraftText& text) {
  const NamedRows rows = facts.output(hidden_);
  const size_t count = facts.num_emitted;
  if (rows.values.empty() || facts.accepted.size() + 1 != count || !is_finite(rows.values)) {
    return release(text);
  }
  const auto begin = static_cast<int64_t>(facts.tokens.size() - count);
  const bool is_fed =
      text.sequence >= 0 && text.first + cache_.committed(text.sequence) == end_of_hidden(text);
  if (is_fed) {
    text.hidden_first = cache_.committed(text.sequence);
    text.hidden.clear();
  }
  const bool follows = text.first >= 0 && end_of_hidden(text) == begin;
  if (!follows || !has_cache_ || text.hidden.size() / cols_ > kMostPending) {
    release(text);
    text.first = begin;
  }
  for (size_t i = has_cache_ ? 0 : count - 1; i < count; ++i) {
    const size_t row = i == 0 ? 0 : static_cast<size_t>(facts.accepted[i - 1]) + 1;
    const auto from = rows.values.begin() + static_cast<ptrdiff_t>(row * cols_);
    text.hidden.insert(text.hidden.end(), from, from + static_cast<ptrdiff_t>(cols_));
  }
  if (!has_cache_) text.first = static_cast<int64_t>(facts.tokens.size()) - 1;
}

bool HeadSteps::knows(const DraftText& text, std::span<const int32_t> tokens) const {
  if (text.first < 0 || end_of_hidden(text) != static_cast<int64_t>(tokens.size())) return false;
  return text.sequence < 0 || text.first + cache_.committed(text.sequence) < end_of_hidden(text);
}

bool HeadSteps::follow(DraftText& text, std::span<const int32_t> tokens) {
  if (text.sequence < 0) text.sequence = cache_.create({});
  const int64_t known = cache_.committed(text.sequence);
  const int64_t guesses = cache_.length(text.sequence) - known;
  if (guesses > 0) cache_.rollback(text.sequence, guesses);
  text.rows.clear();
  const std::span<const int32_t> fresh = tokens.subspan(static_cast<size_t>(text.first + known));
  if (!cache_.can_append(text.sequence, static_cast<int64_t>(fresh.size()))) return false;
  cache_.append(text.sequence, fresh);
  return true;
}

void HeadSteps::release(DraftText& text) {
  if (text.sequence >= 0) cache_.release(text.sequence, false);
  text = DraftText();
}

void HeadSteps::add_rows(const DraftText& text, int64_t first, int64_t last, bool as_tree) {
  DraftSteps::add_rows(text, first, last, as_tree);
  const int64_t start = cache_.committed(text.sequence);
  for (int64_t i = first; i < last; ++i) {
    const std::vector<float>& from = as_tree ? text.states : text.hidden;
    const int64_t row =
        as_tree ? text.rows[static_cast<size_t>(i - start)].parent + 1 : i - text.hidden_first;
    const auto at = from.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(row) * cols_);
    rows_.insert(rows_.end(), at, at + static_cast<ptrdiff_t>(cols_));
  }
}

void HeadSteps::run(Phase phase) {
  executable_ = by_depth_[std::min(static_cast<size_t>(depth_), by_depth_.size() - 1)];
  float_inputs_ = {{kInput, rows_}};
  DraftSteps::run(phase);
  rows_.clear();
}

// The state behind a row of the last run.
void HeadSteps::keep_state(size_t row, std::span<const float> otherwise, DraftText& text) {
  if (!has_state(*executable_)) {
    const std::vector<float> same(otherwise.begin(), otherwise.end());  // of text.states, often
    text.states.insert(text.states.end(), same.begin(), same.end());
    return;
  }
  const std::span<const float> states = executable_->output(kState).values;
  if (states.size() != num_tops() * cols_) {
    throw InvalidArgument("[draft_model] heads: expected a %state f32[R, " + std::to_string(cols_) +
                          "]");
  }
  const std::span<const float> state = states.subspan(row * cols_, cols_);
  text.states.insert(text.states.end(), state.begin(), state.end());
  // Who reads the row's logits gives up then.
  if (is_finite(state)) return;
  values_[row * static_cast<size_t>(top_k_)] = std::numeric_limits<float>::quiet_NaN();
}

void HeadSteps::feed(std::span<DraftText* const> texts) {
  depth_ = 0;
  rows_.clear();
  DraftSteps::feed(texts);
  for (size_t i = 0; i < texts.size(); ++i) {
    texts[i]->states.clear();
    keep_state(i, std::span(texts[i]->hidden).last(cols_), *texts[i]);
  }
}

void HeadSteps::grow(std::span<DraftText* const> texts) {
  depth_ = texts.front()->rows.back().depth;
  rows_.clear();
  DraftSteps::grow(texts);
  size_t row = 0;
  for (DraftText* text : texts) {
    while (text->states.size() / cols_ < text->rows.size() + 1) {
      const int32_t parent = text->rows[text->states.size() / cols_ - 1].parent;
      const auto above = static_cast<size_t>(parent + 1) * cols_;
      keep_state(row++, std::span(text->states).subspan(above, cols_), *text);
    }
  }
}

}  // namespace effinfer::runtime
