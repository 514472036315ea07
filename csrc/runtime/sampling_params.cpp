#include <algorithm>
#include <cmath>
#include <sstream>

#include "effinfer/error.h"
#include "effinfer/sampling.h"

namespace effinfer {
namespace {

template <class T>
void require(bool condition, const char* field, const char* expected, T got) {
  if (condition) return;
  std::ostringstream message;
  message << "[sampling] " << field << ": expected " << expected << ", got " << got;
  throw InvalidArgument(message.str());
}

void require_token(int32_t token, int64_t vocab_size, const char* field) {
  require(token >= 0 && (vocab_size <= 0 || token < vocab_size), field,
          "a token id of the vocabulary", token);
}

void validate_repetition(const SamplingParams& params, int64_t vocab_size) {
  for (const std::vector<int32_t>& word : params.bad_words) {
    require(!word.empty(), "bad_words", "sequences of at least one token", "an empty one");
    for (const int32_t token : word) require_token(token, vocab_size, "bad_words");
  }
  require(params.dry_multiplier >= 0.0f && std::isfinite(params.dry_multiplier), "dry_multiplier",
          "a finite number, at least 0", params.dry_multiplier);
  require(params.dry_base >= 1.0f && std::isfinite(params.dry_base), "dry_base",
          "a finite number, at least 1", params.dry_base);
  require(params.dry_allowed_length >= 1, "dry_allowed_length", "at least 1",
          params.dry_allowed_length);
  require(params.dry_penalty_last_n >= -1, "dry_penalty_last_n", "-1 (all) or more",
          params.dry_penalty_last_n);
  const std::vector<int32_t>& breakers = params.dry_sequence_breakers;
  for (const int32_t token : breakers) require_token(token, vocab_size, "dry_sequence_breakers");
  require(std::is_sorted(breakers.begin(), breakers.end()), "dry_sequence_breakers",
          "ascending ids", "others");
}

}  // namespace

void SamplingParams::validate(int64_t vocab_size) const {
  require(temperature >= 0.0f && std::isfinite(temperature), "temperature",
          "a finite number, at least 0", temperature);
  require(top_k >= 0, "top_k", "at least 0", top_k);
  require(top_p > 0.0f && top_p <= 1.0f, "top_p", "a number in (0, 1]", top_p);
  require(min_p >= 0.0f && min_p <= 1.0f, "min_p", "a number in [0, 1]", min_p);
  require(typical_p > 0.0f && typical_p <= 1.0f, "typical_p", "a number in (0, 1]", typical_p);
  require(repetition_penalty > 0.0f && std::isfinite(repetition_penalty), "repetition_penalty",
          "a finite number above 0", repetition_penalty);
  require(std::isfinite(frequency_penalty), "frequency_penalty", "a finite number",
          frequency_penalty);
  require(std::isfinite(presence_penalty), "presence_penalty", "a finite number", presence_penalty);
  for (const auto& [token, bias] : logit_bias) {
    require_token(token, vocab_size, "logit_bias");
    require(bias < HUGE_VALF, "logit_bias", "numbers below infinity", bias);
  }
  validate_repetition(*this, vocab_size);
  require(top_n_sigma >= 0.0f && std::isfinite(top_n_sigma), "top_n_sigma",
          "a finite number, at least 0", top_n_sigma);
  require(xtc_probability >= 0.0f && xtc_probability <= 1.0f, "xtc_probability",
          "a number in [0, 1]", xtc_probability);
  require(xtc_threshold >= 0.0f && xtc_threshold <= 1.0f, "xtc_threshold", "a number in [0, 1]",
          xtc_threshold);
  require(mirostat >= 0 && mirostat <= 2, "mirostat", "0 (off), 1 or 2", mirostat);
  require(mirostat_tau >= 0.0f && std::isfinite(mirostat_tau), "mirostat_tau",
          "a finite number, at least 0", mirostat_tau);
  require(mirostat_eta >= 0.0f && std::isfinite(mirostat_eta), "mirostat_eta",
          "a finite number, at least 0", mirostat_eta);
  require(max_tokens >= (prompt_logprobs < 0 ? 1 : 0), "max_tokens",
          prompt_logprobs < 0 ? "at least 1 (0 with prompt_logprobs)" : "at least 0", max_tokens);
  for (const int32_t token : stop_token_ids) require_token(token, vocab_size, "stop_token_ids");
  require(logprobs >= -1, "logprobs", "-1 (none) or more", logprobs);
  require(prompt_logprobs >= -1, "prompt_logprobs", "-1 (none) or more", prompt_logprobs);
}

bool SamplingParams::is_plain() const {
  const bool has_penalties =
      repetition_penalty != 1.0f || frequency_penalty != 0.0f || presence_penalty != 0.0f;
  return logit_bias.empty() && bad_words.empty() && !has_penalties && dry_multiplier == 0.0f &&
         top_n_sigma == 0.0f && xtc_probability == 0.0f && mirostat == 0 && logprobs < 0;
}

}  // namespace effinfer
