// From logits to tokens. What decides about a row runs in this order:
//
//   allowed tokens -> logit bias -> bad words -> repetition, frequency and presence penalties
//   -> DRY -> top-n-sigma -> temperature -> top-k -> typical -> top-p -> min-p -> XTC -> mirostat
//   -> draw
//
// What comes before the temperature changes logits; each filter behind it sees the renormalised
// distribution that the one before it left. Temperature 0 takes the highest logit, and nothing
// behind it acts. Top-k keeps exactly k tokens, typical and top-p the smallest set that reaches the
// mass, min-p what is at least min_p times as likely as the likeliest; ties go to the lowest id.
// The repetition penalty divides a positive logit and multiplies a negative one; frequency and
// presence are subtracted after it.
//
// A bad word is a sequence of tokens: the last of them cannot follow the others in the output.
//
// DRY ("don't repeat yourself", P. E. Weidmann 2024, in text-generation-webui): a token that would
// go on as the text did after an earlier occurrence of its last `length` tokens, the longest such,
// loses multiplier * base^(length - allowed_length) where length >= allowed_length. The last tokens
// are counted back to a sequence breaker, and breakers themselves lose nothing. Prompt and output
// are one text, of which the last penalty_last_n tokens count.
//
// Top-n-sigma (Tang et al. 2024, arXiv:2411.07641) drops logits more than n standard deviations, of
// all logits above -infinity, below the highest. XTC ("exclude top choices", P. E. Weidmann 2024,
// in text-generation-webui) drops, with the given probability, all tokens that are at least as
// likely as the threshold but for the least likely of them.
//
// Mirostat (Basu et al. 2021, arXiv:2007.14966) keeps the mean surprise, -log2 p, of what is drawn
// near tau: with version 2 tokens of more than a bound are dropped, with version 1 all but as many
// as Zipf's law says; the bound begins at 2 tau and moves by eta * (tau - surprise) with each
// token, whose p is that before mirostat drops anything.
//
// A draw uses a counter-based generator keyed by (seed, index of the token in its request), so a
// request's text does not depend on the batch that it runs in.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
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
  std::vector<std::vector<int32_t>> bad_words;  // as tokens
  float dry_multiplier = 0.0f;                  // 0: off
  float dry_base = 1.75f;
  int32_t dry_allowed_length = 2;
  int32_t dry_penalty_last_n = -1;             // tokens that are looked at; -1: all
  std::vector<int32_t> dry_sequence_breakers;  // token ids, ascending
  float top_n_sigma = 0.0f;                    // 0: off
  float xtc_probability = 0.0f;                // 0: off
  float xtc_threshold = 0.1f;
  int32_t mirostat = 0;  // 0: off; its version, 1 or 2
  float mirostat_tau = 5.0f;
  float mirostat_eta = 0.1f;
  uint64_t seed = 0;
  int32_t max_tokens = 128;  // 0: the prompt is scored, with prompt_logprobs
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  int32_t logprobs = -1;         // -1: none; n >= 0: of the chosen token and the n most likely
  int32_t prompt_logprobs = -1;  // the same of the prompt's tokens
  bool speculation = true;       // whether the engine may draft for this request
  // Those of the engine's techniques that the request runs with, by name; none: all of them.
  std::optional<std::vector<std::string>> techniques;

  // Throws InvalidArgument naming the field; `vocab_size` checks ids when it is > 0.
  EFFINFER_API void validate(int64_t vocab_size = 0) const;
  // Whether temperature, top-k, typical, top-p and min-p alone choose, and no log-probability is
  // told: the row's highest logits then suffice for top-k, and the text so far is not looked at.
  // Whoever samples in a shorter way asks this first.
  EFFINFER_API bool is_plain() const;
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

// What mirostat remembers of a text.
struct Mirostat {
  std::optional<double> most_bits;  // of surprise; none: nothing was drawn, 2 tau
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
  // t / 32; the others have probability 0; empty: all. `mirostat`, where the parameters ask for it,
  // goes on by the token; null: a text's beginning. Throws InvalidArgument when the logits hold a
  // NaN or +infinity, or nothing above -infinity, and when nothing is allowed.
  SampledToken sample(std::span<const float> logits, const SamplingParams& params,
                      std::span<const int32_t> prompt, std::span<const int32_t> output,
                      uint64_t index, std::span<const uint32_t> allowed = {},
                      Mirostat* mirostat = nullptr);
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
  // the filters removed. Greedy gives a single 1. XTC acts or not as `index` says.
  void distribution(std::span<const float> logits, const SamplingParams& params,
                    std::span<const int32_t> prompt, std::span<const int32_t> output,
                    std::span<float> probabilities, std::span<const uint32_t> allowed = {},
                    uint64_t index = 0, const Mirostat* mirostat = nullptr);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace effinfer
