#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "effinfer/error.h"
#include "effinfer/sampling.h"
#include "core/philox.h"
#include "runtime/row_math.h"

namespace effinfer {
namespace {

bool is_adjusted(const SamplingParams& params) {
  return !params.logit_bias.empty() || params.repetition_penalty != 1.0f ||
         params.frequency_penalty != 0.0f || params.presence_penalty != 0.0f;
}

void check_token(int32_t token, size_t vocab, const char* what) {
  if (token >= 0 && static_cast<size_t>(token) < vocab) return;
  throw InvalidArgument(std::string("[sampling] ") + what + ": expected ids in 0.." +
                        std::to_string(vocab - 1) + ", got " + std::to_string(token));
}

}  // namespace

// Likelier first, the lower id among equals.
struct Sampler::Order {
  bool operator()(const Candidate& a, const Candidate& b) const {
    return a.log_weight != b.log_weight ? a.log_weight > b.log_weight : a.token < b.token;
  }
};

// Keeps the first candidates in the order of `before` whose weights reach `mass`, at least one,
// sorted in that order. Sorts only as far as needed: a block, then the next of twice the size.
template <class Before>
void Sampler::keep_mass(double mass, Before before) {
  double sum = 0.0;
  size_t first = 0;
  for (size_t block = 64; first < candidates_.size(); block *= 2) {
    const size_t last = std::min(first + block, candidates_.size());
    const auto begin = candidates_.begin() + static_cast<ptrdiff_t>(first);
    const auto end = candidates_.begin() + static_cast<ptrdiff_t>(last);
    if (end != candidates_.end()) std::nth_element(begin, end, candidates_.end(), before);
    std::sort(begin, end, before);
    for (; first < last; ++first) {
      sum += static_cast<double>(candidates_[first].weight);
      if (sum >= mass) {
        candidates_.resize(first + 1);
        return;
      }
    }
  }
}

void Sampler::penalize(const SamplingParams& params, std::span<const int32_t> prompt,
                       std::span<const int32_t> output) {
  counts_.resize(work_.size());
  const auto reset = [&](std::span<const int32_t> tokens) {
    for (const int32_t token : tokens) counts_[static_cast<size_t>(token)] = 0;
  };
  for (const int32_t token : prompt) check_token(token, work_.size(), "prompt");
  for (const int32_t token : output) check_token(token, work_.size(), "output");
  if (params.repetition_penalty != 1.0f) {
    for (const std::span<const int32_t> tokens : {prompt, output}) {
      for (const int32_t token : tokens) {
        if (counts_[static_cast<size_t>(token)]++ != 0) continue;
        float& logit = work_[static_cast<size_t>(token)];
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
    work_[static_cast<size_t>(token)] -=
        params.frequency_penalty * static_cast<float>(count) + params.presence_penalty;
    count = 0;
  }
}

// The logits after bias and penalties: a copy in work_ only when there are any.
std::span<const float> Sampler::adjust(std::span<const float> logits, const SamplingParams& params,
                                       std::span<const int32_t> prompt,
                                       std::span<const int32_t> output) {
  if (!is_adjusted(params)) return logits;
  work_.assign(logits.begin(), logits.end());
  for (const auto& [token, bias] : params.logit_bias) {
    check_token(token, work_.size(), "logit_bias");
    work_[static_cast<size_t>(token)] += bias;
  }
  penalize(params, prompt, output);
  return work_;
}

// The `count` highest of `values`, sorted: one pass that keeps a buffer of those above the count-th
// highest so far, cut back each time it fills.
void Sampler::select_top(std::span<const float> logits, size_t count) {
  candidates_.clear();
  count = std::min(count, logits.size());
  if (count == 0) return;
  const size_t capacity = 2 * count + 64;
  candidates_.reserve(capacity);
  const auto cut = [&] {
    std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<ptrdiff_t>(count - 1),
                     candidates_.end(), Order{});
    candidates_.resize(count);
  };
  float least = -std::numeric_limits<float>::infinity();
  bool full = false;
  for (size_t i = 0; i < logits.size(); ++i) {
    // An equal value at a higher id loses to those that are in.
    if (full && !(logits[i] > least)) continue;
    candidates_.push_back({logits[i], 0.0f, static_cast<int32_t>(i)});
    if (candidates_.size() < capacity) continue;
    cut();
    least = candidates_[count - 1].log_weight;
    full = true;
  }
  if (candidates_.size() > count) cut();
  std::sort(candidates_.begin(), candidates_.end(), Order{});
}

void Sampler::gather(float least_weight) {
  candidates_.clear();
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i] < least_weight) continue;
    candidates_.push_back({work_[i], weights_[i], static_cast<int32_t>(i)});
  }
}

// Meister et al. 2022: the smallest set, by distance of -log p from the entropy, with that mass.
void Sampler::keep_typical(float mass) {
  std::erase_if(candidates_, [](const Candidate& c) { return c.weight == 0.0f; });
  double total = 0.0;
  double moment = 0.0;
  for (const Candidate& c : candidates_) {
    total += static_cast<double>(c.weight);
    moment += static_cast<double>(c.weight) * static_cast<double>(c.log_weight);
  }
  // log p = log_weight - log(total), entropy = log(total) - moment / total: the logarithms cancel.
  const double mean = moment / total;
  keep_mass(static_cast<double>(mass) * total, [mean](const Candidate& a, const Candidate& b) {
    const double distance_a = std::abs(static_cast<double>(a.log_weight) - mean);
    const double distance_b = std::abs(static_cast<double>(b.log_weight) - mean);
    return distance_a != distance_b ? distance_a < distance_b : a.token < b.token;
  });
  std::sort(candidates_.begin(), candidates_.end(), Order{});
}

void Sampler::keep_top_p(float mass, double total) {
  keep_mass(static_cast<double>(mass) * total, Order{});
}

void Sampler::keep_min_p(float ratio) {
  std::sort(candidates_.begin(), candidates_.end(), Order{});
  const float least = ratio * candidates_.front().weight;
  std::erase_if(candidates_, [least](const Candidate& c) { return c.weight < least; });
}

// What follows top-k: candidates_ hold the k highest logits, the highest first.
void Sampler::filter_top(const SamplingParams& params) {
  const float max = candidates_.front().log_weight;
  for (Candidate& c : candidates_) {
    c.log_weight = (c.log_weight - max) / params.temperature;
    c.weight = runtime::exp_nonpositive(c.log_weight);
  }
  filter_candidates(params);
}

// The filters after top-k, on candidates that are all there is.
void Sampler::filter_candidates(const SamplingParams& params) {
  if (params.typical_p < 1.0f) keep_typical(params.typical_p);
  if (params.top_p < 1.0f) keep_top_p(params.top_p, total_weight());
  if (params.min_p > 0.0f) keep_min_p(params.min_p);
}

double Sampler::total_weight() const {
  double total = 0.0;
  for (const Candidate& c : candidates_) total += static_cast<double>(c.weight);
  return total;
}

bool Sampler::filter(std::span<const float> logits, const SamplingParams& params,
                     std::span<const int32_t> prompt, std::span<const int32_t> output) {
  const std::span<const float> adjusted = adjust(logits, params, prompt, output);
  const size_t vocab = logits.size();
  const float max = runtime::checked_max(adjusted);
  if (params.temperature == 0.0f) {
    candidates_.assign(1, {0.0f, 1.0f, runtime::index_of(adjusted, max)});
    return true;
  }
  if (params.top_k > 0 && static_cast<size_t>(params.top_k) < vocab) {
    select_top(adjusted, static_cast<size_t>(params.top_k));
    filter_top(params);
    return true;
  }
  work_.resize(vocab);
  runtime::log_weights(adjusted, max, params.temperature, work_.data());
  const bool typical = params.typical_p < 1.0f;
  const bool top_p = params.top_p < 1.0f;
  if (!typical && !top_p && params.min_p <= 0.0f) return false;
  weights_.resize(vocab);
  const double total = runtime::exp_sum(work_, 0.0f, weights_.data());
  float least = 0.0f;
  if (!typical && top_p) {
    // Tokens less likely than (1 - top_p) / vocab hold less than 1 - top_p together: the nucleus
    // is complete without them. Half of that leaves room for rounding.
    least = static_cast<float>(0.5 * (1.0 - static_cast<double>(params.top_p)) * total /
                               static_cast<double>(vocab));
  } else if (!typical) {
    least = params.min_p;  // the likeliest weighs 1
  }
  gather(least);
  if (!typical && top_p) {
    keep_top_p(params.top_p, total);
    if (params.min_p > 0.0f) keep_min_p(params.min_p);
  } else {
    filter_candidates(params);
  }
  return true;
}

int32_t Sampler::draw_candidate(double uniform) const {
  double left = uniform * total_weight();
  int32_t token = candidates_.front().token;
  for (const Candidate& c : candidates_) {
    if (c.weight > 0.0f) token = c.token;
    left -= static_cast<double>(c.weight);
    if (left < 0.0) break;
  }
  return token;
}

int32_t Sampler::sufficient_top(const SamplingParams& params, int64_t vocab_size) {
  if (is_adjusted(params) || params.logprobs >= 0) return 0;
  if (params.temperature == 0.0f) return 1;
  return params.top_k < vocab_size ? params.top_k : 0;
}

SampledToken Sampler::sample_top(std::span<const float> values, std::span<const int32_t> tokens,
                                 const SamplingParams& params, uint64_t index) {
  const auto needed =
      static_cast<size_t>(sufficient_top(params, std::numeric_limits<int32_t>::max()));
  if (needed == 0 || values.size() < needed || values.size() != tokens.size()) {
    throw InvalidArgument("[sampling] values: expected at least " + std::to_string(needed) +
                          " of the highest logits and as many tokens, got " +
                          std::to_string(values.size()) + " and " + std::to_string(tokens.size()));
  }
  runtime::checked_max(values);
  SampledToken sampled;
  sampled.token = tokens.front();
  if (params.temperature == 0.0f) return sampled;
  candidates_.clear();
  for (size_t i = 0; i < needed; ++i) candidates_.push_back({values[i], 0.0f, tokens[i]});
  filter_top(params);
  sampled.token = draw_candidate(philox_uniform(params.seed, index));
  return sampled;
}

SampledToken Sampler::sample(std::span<const float> logits, const SamplingParams& params,
                             std::span<const int32_t> prompt, std::span<const int32_t> output,
                             uint64_t index) {
  SampledToken sampled;
  if (params.temperature == 0.0f && !is_adjusted(params)) {
    sampled.token = runtime::index_of(logits, runtime::checked_max(logits));
  } else if (const double uniform = philox_uniform(params.seed, index);
             filter(logits, params, prompt, output)) {
    sampled.token = draw_candidate(uniform);
  } else {
    weights_.resize(logits.size());
    double left = uniform * runtime::exp_sum(work_, 0.0f, weights_.data());
    for (size_t i = 0; i < weights_.size(); ++i) {
      if (weights_[i] > 0.0f) sampled.token = static_cast<int32_t>(i);
      left -= static_cast<double>(weights_[i]);
      if (left < 0.0) break;
    }
  }
  if (params.logprobs >= 0) add_logprobs(logits, params, sampled);
  return sampled;
}

void Sampler::distribution(std::span<const float> logits, const SamplingParams& params,
                           std::span<const int32_t> prompt, std::span<const int32_t> output,
                           std::span<float> probabilities) {
  if (probabilities.size() != logits.size()) {
    throw InvalidArgument("[sampling] probabilities: expected " + std::to_string(logits.size()) +
                          " values, got " + std::to_string(probabilities.size()));
  }
  if (!filter(logits, params, prompt, output)) {
    const double total = runtime::exp_sum(work_, 0.0f, probabilities.data());
    for (float& p : probabilities) p = static_cast<float>(static_cast<double>(p) / total);
    return;
  }
  std::fill(probabilities.begin(), probabilities.end(), 0.0f);
  const double total = total_weight();
  for (const Candidate& c : candidates_) {
    probabilities[static_cast<size_t>(c.token)] =
        static_cast<float>(static_cast<double>(c.weight) / total);
  }
}

void Sampler::add_logprobs(std::span<const float> logits, const SamplingParams& params,
                           SampledToken& sampled) {
  const float max = runtime::checked_max(logits);
  const double log_total =
      static_cast<double>(max) + std::log(runtime::exp_sum(logits, max, nullptr));
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - log_total);
  };
  sampled.logprob = logprob(logits[static_cast<size_t>(sampled.token)]);
  select_top(logits, static_cast<size_t>(params.logprobs));
  for (const Candidate& c : candidates_) sampled.top.push_back({c.token, logprob(c.log_weight)});
}

}  // namespace effinfer
