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
  require(max_tokens >= 1, "max_tokens", "at least 1", max_tokens);
  for (const int32_t token : stop_token_ids) require_token(token, vocab_size, "stop_token_ids");
  require(logprobs >= -1, "logprobs", "-1 (none) or more", logprobs);
}

}  // namespace effinfer
