// From logits to tokens. The filters of a row run in this order:
//
//   allowed tokens -> logit bias -> repetition, frequency and presence penalties -> temperature
//   -> top-k -> typical -> top-p -> min-p -> draw
//
// Each filter sees the renormalised distribution that the one before it left. Top-k keeps exactly k
// tokens, typical and top-p the smallest set that reaches the mass, min-p what is at least min_p
// times as likely as the likeliest; ties go to the lowest id. The repetition penalty divides a
// positive logit and multiplies a negative one; frequency and presence are subtracted after it.
//
// A draw uses a counter-based generator keyed by (seed, index of the token in its request), so a
// request's text does not depend on the batch that it runs in.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "effinfer/device.h"
#include "effinfer/export.h"

namespace effinfer {

struct SamplingParams {
  float temperature = 1.0f;         // 0: greedy
  int32_t top_k = 0;                // 0: off
  float top_p = 1.0f;               // 1: off
  float min_p = 0.0f;               // 0: off
  float typical_p = 1.0f;           // 1: off (Meister et al. 2022, locally typical sampling)
  float repetition_penalty = 1.0f;  // 1: off; over prompt and output (Keskar et al. 2019, CTRL)
  float frequency_penalty = 0.0f;   // over the output, times the count
  float presence_penalty = 0.0f;    // over the output, once
  std::vector<std::pair<int32_t, float>> logit_bias;
  uint64_t seed = 0;
  int32_t max_tokens = 128;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  int32_t logprobs = -1;    // -1: none; n >= 0: of the chosen token and the n most likely
  bool speculation = true;  // whether the engine may draft for this request

  // Throws InvalidArgument naming the field; `vocab_size` checks ids when it is > 0.
  EFFINFER_API void validate(int64_t vocab_size = 0) const;
};

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0.0f;  // natural log, of the model's distribution before any filter
};

struct SampledToken {
  int32_t token = 0;
  float logprob = 0.0f;           // set when logprobs >= 0
  std::vector<TokenLogprob> top;  // the `logprobs` most likely, best first
};

// Samples rows with scratch that it keeps between calls: one sampler a thread.
class EFFINFER_API Sampler {
 public:
  explicit Sampler(Isa isa = current_isa());  // the level of its kernels
  ~Sampler();
  Sampler(Sampler&&) noexcept;
  Sampler& operator=(Sampler&&) noexcept;

  // `logits` of one row (not changed), `prompt` and `output` tokens so far (for penalties); `index`
  // is the number of tokens this request has drawn. `allowed`: a bit for each token, t % 32 of word
  // t / 32; the others have probability 0; empty: all. Throws InvalidArgument when the logits hold
  // a NaN or +infinity, or nothing above -infinity, and when nothing is allowed.
  SampledToken sample(std::span<const float> logits, const SamplingParams& params,
                      std::span<const int32_t> prompt, std::span<const int32_t> output,
                      uint64_t index, std::span<const uint32_t> allowed = {});
  // Draws what sample() would from the highest logits alone: `values`, highest first, and their
  // `tokens`, the lower id first among equals, at least sufficient_top() of them. Of a row that
  // holds a NaN anywhere the first value is one. Throws InvalidArgument for fewer values, and as
  // sample() does.
  SampledToken sample_top(std::span<const float> values, std::span<const int32_t> tokens,
                          const SamplingParams& params, uint64_t index);
  // How many of the highest logits sample() needs to see; 0: all of them.
  static int32_t sufficient_top(const SamplingParams& params, int64_t vocab_size);
  // Whether sample() needs a row's logits, seed and index alone, and nothing but top-k, top-p and
  // min-p narrow them: what devices draw by themselves.
  static bool is_drawn_from_logits(const SamplingParams& params);
  // The highest logits of a row, as many as `values` has, highest first and the lower id first
  // among equals; the first is NaN where the row holds one.
  void highest(std::span<const float> logits, std::span<float> values, std::span<int32_t> tokens);
  // The log-probabilities that sample() gives with its token, for the token that `sampled` has.
  void add_logprobs(std::span<const float> logits, const SamplingParams& params,
                    SampledToken& sampled);
  // The distribution that sample() draws from: `probabilities` [vocab] sums to 1, and is 0 for what
  // the filters removed. Greedy gives a single 1.
  void distribution(std::span<const float> logits, const SamplingParams& params,
                    std::span<const int32_t> prompt, std::span<const int32_t> output,
                    std::span<float> probabilities, std::span<const uint32_t> allowed = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace effinfer
