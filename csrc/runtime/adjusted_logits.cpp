#include "runtime/adjusted_logits.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "effinfer/error.h"

namespace effinfer::runtime {
namespace {

// Penalties beyond it leave a logit finite: a row whose tokens are all penalised still has a
// likeliest one.
constexpr double kMostPenalty = 1e30;

bool has_counts(const SamplingParams& params) {
  return params.repetition_penalty != 1.0f || params.frequency_penalty != 0.0f ||
         params.presence_penalty != 0.0f;
}

bool has_dry(const SamplingParams& params) {
  return params.dry_multiplier > 0.0f && params.dry_penalty_last_n != 0;
}

bool is_adjusted(const SamplingParams& params) {
  return !params.logit_bias.empty() || !params.bad_words.empty() || has_counts(params) ||
         has_dry(params) || params.top_n_sigma > 0.0f;
}

bool ends_with(std::span<const int32_t> text, std::span<const int32_t> end) {
  return end.size() <= text.size() &&
         std::equal(end.begin(), end.end(), text.end() - static_cast<ptrdiff_t>(end.size()));
}

// For each place of `text` but the first, how many tokens from there on equal those from the start
// (the Z-function: Gusfield 1997, Algorithms on Strings, section 1.4). Linear in the text.
void match_start(std::span<const int32_t> text, std::vector<int32_t>& lengths) {
  const size_t n = text.size();
  lengths.assign(n, 0);
  size_t left = 0;
  size_t right = 0;  // text[left, right) equals the start, and no known stretch ends later
  for (size_t i = 1; i < n; ++i) {
    size_t length = 0;
    if (i < right) length = std::min(right - i, static_cast<size_t>(lengths[i - left]));
    while (i + length < n && text[length] == text[i + length]) ++length;
    if (i + length > right) {
      left = i;
      right = i + length;
    }
    lengths[i] = static_cast<int32_t>(length);
  }
}

}  // namespace

void check_token(int32_t token, size_t vocab, const char* what) {
  if (token >= 0 && static_cast<size_t>(token) < vocab) return;
  throw InvalidArgument(std::string("[sampling] ") + what + ": expected ids in 0.." +
                        std::to_string(vocab - 1) + ", got " + std::to_string(token));
}

std::span<const float> LogitAdjuster::adjust(std::span<const float> logits,
                                             const SamplingParams& params,
                                             std::span<const int32_t> prompt,
                                             std::span<const int32_t> output,
                                             std::span<const uint32_t> allowed) {
  if (allowed.empty() && !is_adjusted(params)) return logits;
  adjusted_.assign(logits.begin(), logits.end());
  if (!allowed.empty()) mask(allowed);
  if (!is_adjusted(params)) return adjusted_;
  for (const int32_t token : prompt) check_token(token, adjusted_.size(), "prompt");
  for (const int32_t token : output) check_token(token, adjusted_.size(), "output");
  for (const auto& [token, bias] : params.logit_bias) {
    check_token(token, adjusted_.size(), "logit_bias");
    adjusted_[static_cast<size_t>(token)] += bias;
  }
  ban_words(params, output);
  if (has_counts(params)) penalize(params, prompt, output);
  if (has_dry(params)) penalize_repetition(params, prompt, output);
  if (params.top_n_sigma > 0.0f) keep_top_n_sigma(params.top_n_sigma);
  return adjusted_;
}

void LogitAdjuster::mask(std::span<const uint32_t> allowed) {
  constexpr size_t kBits = 32;
  if (allowed.size() != (adjusted_.size() + kBits - 1) / kBits) {
    throw InvalidArgument("[sampling] allowed: expected " +
                          std::to_string((adjusted_.size() + kBits - 1) / kBits) + " words, got " +
                          std::to_string(allowed.size()));
  }
  bool any = false;
  for (size_t word = 0; word < allowed.size(); ++word) {
    const size_t first = word * kBits;
    const size_t count = std::min(kBits, adjusted_.size() - first);
    const uint32_t present = ~uint32_t{0} >> (kBits - count);
    const uint32_t kept = allowed[word] & present;
    any = any || kept != 0;
    if (kept == present) continue;
    for (size_t bit = 0; bit < count; ++bit) {
      if ((kept >> bit & 1) == 0) adjusted_[first + bit] = -HUGE_VALF;
    }
  }
  if (!any) throw InvalidArgument("[sampling] allowed: expected at least one token, got none");
}

// A token that would complete one of the sequences cannot come.
void LogitAdjuster::ban_words(const SamplingParams& params, std::span<const int32_t> output) {
  for (const std::vector<int32_t>& word : params.bad_words) {
    check_token(word.back(), adjusted_.size(), "bad_words");
    if (!ends_with(output, std::span(word).first(word.size() - 1))) continue;
    adjusted_[static_cast<size_t>(word.back())] = -HUGE_VALF;
  }
}

void LogitAdjuster::penalize(const SamplingParams& params, std::span<const int32_t> prompt,
                             std::span<const int32_t> output) {
  counts_.resize(adjusted_.size());
  const auto reset = [&](std::span<const int32_t> tokens) {
    for (const int32_t token : tokens) counts_[static_cast<size_t>(token)] = 0;
  };
  if (params.repetition_penalty != 1.0f) {
    for (const std::span<const int32_t> tokens : {prompt, output}) {
      for (const int32_t token : tokens) {
        if (counts_[static_cast<size_t>(token)]++ != 0) continue;
        float& logit = adjusted_[static_cast<size_t>(token)];
        logit =
            logit > 0.0f ? logit / params.repetition_penalty : logit * params.repetition_penalty;
      }
    }
    reset(prompt);
    reset(output);
  }
  for (const int32_t token : output) ++counts_[static_cast<size_t>(token)];
  for (const int32_t token : output) {
    int32_t& count = counts_[static_cast<size_t>(token)];
    if (count == 0) continue;
    adjusted_[static_cast<size_t>(token)] -=
        params.frequency_penalty * static_cast<float>(count) + params.presence_penalty;
    count = 0;
  }
}

// DRY: a token that would go on with a repetition of the last tokens is penalised by how many of
// them there are, up to a breaker.
void LogitAdjuster::penalize_repetition(const SamplingParams& params,
                                        std::span<const int32_t> prompt,
                                        std::span<const int32_t> output) {
  const size_t size = prompt.size() + output.size();
  const size_t window = params.dry_penalty_last_n < 0
                            ? size
                            : std::min(size, static_cast<size_t>(params.dry_penalty_last_n));
  history_.clear();
  for (size_t i = size; i-- > size - window;) {
    history_.push_back(i < prompt.size() ? prompt[i] : output[i - prompt.size()]);
  }
  const auto is_breaker = [&](int32_t token) {
    return std::binary_search(params.dry_sequence_breakers.begin(),
                              params.dry_sequence_breakers.end(), token);
  };
  const auto first_breaker = std::find_if(history_.begin(), history_.end(), is_breaker);
  const auto longest = static_cast<int32_t>(first_breaker - history_.begin());
  if (longest == 0 || longest < params.dry_allowed_length) return;
  match_start(history_, matches_);
  repeats_.clear();
  for (size_t i = 1; i < history_.size(); ++i) {
    const int32_t length = std::min(matches_[i], longest);
    if (length < std::max(params.dry_allowed_length, 1)) continue;
    const int32_t next = history_[i - 1];
    if (!is_breaker(next)) repeats_.emplace_back(next, length);
  }
  std::sort(repeats_.begin(), repeats_.end());
  for (size_t i = 0; i < repeats_.size(); ++i) {
    const auto [token, length] = repeats_[i];
    if (i + 1 < repeats_.size() && repeats_[i + 1].first == token) continue;  // a longer one comes
    const double penalty = static_cast<double>(params.dry_multiplier) *
                           std::pow(static_cast<double>(params.dry_base),
                                    static_cast<double>(length - params.dry_allowed_length));
    adjusted_[static_cast<size_t>(token)] -= static_cast<float>(std::min(penalty, kMostPenalty));
  }
}

// Top-n-sigma: what lies more than n standard deviations below the highest logit goes. Tokens that
// cannot come do not count.
void LogitAdjuster::keep_top_n_sigma(float n) {
  double sum = 0.0;
  double squares = 0.0;
  double highest = -HUGE_VAL;
  size_t count = 0;
  for (const float logit : adjusted_) {
    if (logit == -HUGE_VALF) continue;
    const auto value = static_cast<double>(logit);
    sum += value;
    highest = std::max(highest, value);
    ++count;
  }
  const double mean = sum / static_cast<double>(count);
  for (const float logit : adjusted_) {
    if (logit == -HUGE_VALF) continue;
    const double distance = static_cast<double>(logit) - mean;
    squares += distance * distance;
  }
  const double least =
      highest - static_cast<double>(n) * std::sqrt(squares / static_cast<double>(count));
  for (float& logit : adjusted_) {
    if (static_cast<double>(logit) < least) logit = -HUGE_VALF;
  }
}

}  // namespace effinfer::runtime
