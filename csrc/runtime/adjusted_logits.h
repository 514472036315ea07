// What is done to a row's logits before any filter: the mask, biases, words that may not come, and
// penalties on what was said.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "effinfer/sampling.h"

namespace effinfer::runtime {

// Throws InvalidArgument for a token that a row of `vocab` logits does not have.
void check_token(int32_t token, size_t vocab, const char* what);

class LogitAdjuster {
 public:
  // The logits as the filters shall see them: `logits` themselves where nothing changes them, a
  // copy that lasts until the next call otherwise. Throws InvalidArgument.
  std::span<const float> adjust(std::span<const float> logits, const SamplingParams& params,
                                std::span<const int32_t> prompt, std::span<const int32_t> output,
                                std::span<const uint32_t> allowed);

 private:
  void mask(std::span<const uint32_t> allowed);
  void ban_words(const SamplingParams& params, std::span<const int32_t> output);
  void penalize(const SamplingParams& params, std::span<const int32_t> prompt,
                std::span<const int32_t> output);
  void penalize_repetition(const SamplingParams& params, std::span<const int32_t> prompt,
                           std::span<const int32_t> output);
  void keep_top_n_sigma(float n);

  std::vector<float> adjusted_;
  std::vector<int32_t> counts_;   // a token's uses; zeros between calls
  std::vector<int32_t> history_;  // the text, last token first
  std::vector<int32_t> matches_;  // by place in it, how many tokens equal the last ones
  std::vector<std::pair<int32_t, int32_t>> repeats_;  // token, length of what it would repeat
};

}  // namespace effinfer::runtime
