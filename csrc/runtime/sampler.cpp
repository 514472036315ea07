#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "core/philox.h"
#include "effinfer/error.h"
#include "effinfer/sampling.h"
#include "runtime/row_scratch.h"

namespace effinfer {
namespace {

using cpu::RowDistribution;

bool is_adjusted(const SamplingParams& params) {
  return !params.logit_bias.empty() || params.repetition_penalty != 1.0f ||
         params.frequency_penalty != 0.0f || params.presence_penalty != 0.0f;
}

void check_token(int32_t token, size_t vocab, const char* what) {
  if (token >= 0 && static_cast<size_t>(token) < vocab) return;
  throw InvalidArgument(std::string("[sampling] ") + what + ": expected ids in 0.." +
                        std::to_string(vocab - 1) + ", got " + std::to_string(token));
}

struct Candidate {
  double distance;  // of -log p from the entropy
  double weight;
  int64_t place;
};

// Keeps the first candidates that hold `mass`, at least one, the nearest first and the lower place
// among equals. Sorts only as far as needed: a block, then the next of twice the size.
void keep_mass(double mass, std::vector<Candidate>& candidates) {
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.distance != b.distance ? a.distance < b.distance : a.place < b.place;
  };
  double sum = 0.0;
  size_t first = 0;
  for (size_t block = 64; first < candidates.size(); block *= 2) {
    const size_t last = std::min(first + block, candidates.size());
    const auto begin = candidates.begin() + static_cast<ptrdiff_t>(first);
    const auto end = candidates.begin() + static_cast<ptrdiff_t>(last);
    if (end != candidates.end()) std::nth_element(begin, end, candidates.end(), before);
    std::sort(begin, end, before);
    for (; first < last; ++first) {
      sum += candidates[first].weight;
      if (sum >= mass) {
        candidates.resize(first + 1);
        return;
      }
    }
  }
}

}  // namespace

struct Sampler::State {
  explicit State(Isa isa) : scratch(isa) {}

  runtime::RowScratch scratch;
  std::vector<float> adjusted;
  std::vector<int32_t> counts;  // a token's uses; zeros between calls
  std::vector<Candidate> candidates;
  std::vector<std::pair<int32_t, float>> top;

  // The logits after the mask, bias and penalties: a copy only when there are any.
  std::span<const float> adjust(std::span<const float> logits, const SamplingParams& params,
                                std::span<const int32_t> prompt, std::span<const int32_t> output,
                                std::span<const uint32_t> allowed) {
    if (allowed.empty() && !is_adjusted(params)) return logits;
    adjusted.assign(logits.begin(), logits.end());
    if (!allowed.empty()) mask(allowed);
    if (!is_adjusted(params)) return adjusted;
    for (const auto& [token, bias] : params.logit_bias) {
      check_token(token, adjusted.size(), "logit_bias");
      adjusted[static_cast<size_t>(token)] += bias;
    }
    penalize(params, prompt, output);
    return adjusted;
  }

  void mask(std::span<const uint32_t> allowed) {
    constexpr size_t kBits = 32;
    if (allowed.size() != (adjusted.size() + kBits - 1) / kBits) {
      throw InvalidArgument("[sampling] allowed: expected " +
                            std::to_string((adjusted.size() + kBits - 1) / kBits) + " words, got " +
                            std::to_string(allowed.size()));
    }
    bool any = false;
    for (size_t word = 0; word < allowed.size(); ++word) {
      const size_t first = word * kBits;
      const size_t count = std::min(kBits, adjusted.size() - first);
      const uint32_t present = ~uint32_t{0} >> (kBits - count);
      const uint32_t kept = allowed[word] & present;
      any = any || kept != 0;
      if (kept == present) continue;
      for (size_t bit = 0; bit < count; ++bit) {
        if ((kept >> bit & 1) == 0) adjusted[first + bit] = -HUGE_VALF;
      }
    }
    if (!any) throw InvalidArgument("[sampling] allowed: expected at least one token, got none");
  }

  void penalize(const SamplingParams& params, std::span<const int32_t> prompt,
                std::span<const int32_t> output) {
    counts.resize(adjusted.size());
    const auto reset = [&](std::span<const int32_t> tokens) {
      for (const int32_t token : tokens) counts[static_cast<size_t>(token)] = 0;
    };
    for (const int32_t token : prompt) check_token(token, adjusted.size(), "prompt");
    for (const int32_t token : output) check_token(token, adjusted.size(), "output");
    if (params.repetition_penalty != 1.0f) {
      for (const std::span<const int32_t> tokens : {prompt, output}) {
        for (const int32_t token : tokens) {
          if (counts[static_cast<size_t>(token)]++ != 0) continue;
          float& logit = adjusted[static_cast<size_t>(token)];
          logit =
              logit > 0.0f ? logit / params.repetition_penalty : logit * params.repetition_penalty;
        }
      }
      reset(prompt);
      reset(output);
    }
    for (const int32_t token : output) ++counts[static_cast<size_t>(token)];
    for (const int32_t token : output) {
      int32_t& count = counts[static_cast<size_t>(token)];
      if (count == 0) continue;
      adjusted[static_cast<size_t>(token)] -=
          params.frequency_penalty * static_cast<float>(count) + params.presence_penalty;
      count = 0;
    }
  }

  // Meister et al. 2022: the smallest set, by distance of -log p from the entropy, with that mass.
  void keep_typical(float mass, RowDistribution& row) {
    const double total = row.total();
    double moment = 0.0;
    candidates.clear();
    for (int64_t i = 0; i < row.size(); ++i) {
      const auto weight = static_cast<double>(row.values()[i]);
      if (weight <= 0.0) continue;
      const double log_weight = std::log(weight);
      moment += weight * log_weight;
      candidates.push_back({log_weight, weight, i});
    }
    // log p = log_weight - log(total), entropy = log(total) - moment / total: the logarithms
    // cancel.
    const double mean = moment / total;
    for (Candidate& c : candidates) c.distance = std::abs(c.distance - mean);
    keep_mass(static_cast<double>(mass) * total, candidates);
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.place < b.place; });
    row.keep_places(candidates.size(), [this](size_t i) { return candidates[i].place; });
  }

  // Applies the filters that follow top-k.
  void narrow(const SamplingParams& params, RowDistribution& row) {
    row.to_weights(params.temperature);
    if (params.typical_p < 1.0f) keep_typical(params.typical_p, row);
    row.keep_top_p(params.top_p);
    if (params.min_p > 0.0f) row.keep_min_p(params.min_p);
  }

  RowDistribution filter(std::span<const float> logits, const SamplingParams& params,
                         std::span<const int32_t> prompt, std::span<const int32_t> output,
                         std::span<const uint32_t> allowed) {
    const std::span<const float> row_logits = adjust(logits, params, prompt, output, allowed);
    RowDistribution row = scratch.row(logits.size());
    const bool greedy = params.temperature == 0.0f;
    const int64_t k = greedy ? 1 : params.top_k;
    runtime::start(row, row_logits, k);
    if (k > 0) row.keep_top_k(k);
    if (greedy) {
      row.to_weights(1.0f);
    } else {
      narrow(params, row);
    }
    return row;
  }

  void add_logprobs(std::span<const float> logits, const SamplingParams& params,
                    SampledToken& sampled) {
    RowDistribution row = scratch.row(logits.size());
    const double log_total = runtime::log_sum_exp(row, logits);
    const auto logprob = [&](float logit) {
      return static_cast<float>(static_cast<double>(logit) - log_total);
    };
    sampled.logprob = logprob(logits[static_cast<size_t>(sampled.token)]);
    if (params.logprobs == 0) return;
    runtime::start(row, logits, params.logprobs);
    row.keep_top_k(params.logprobs);
    for (int64_t i = 0; i < row.size(); ++i) {
      const auto token = row.ids() == nullptr ? static_cast<int32_t>(i) : row.ids()[i];
      sampled.top.push_back({token, logprob(row.values()[i])});
    }
    std::stable_sort(
        sampled.top.begin(), sampled.top.end(), [&](const TokenLogprob& a, const TokenLogprob& b) {
          return logits[static_cast<size_t>(a.token)] > logits[static_cast<size_t>(b.token)];
        });
  }
};

Sampler::Sampler(Isa isa) : state_(std::make_unique<State>(isa)) {}
Sampler::~Sampler() = default;
Sampler::Sampler(Sampler&&) noexcept = default;
Sampler& Sampler::operator=(Sampler&&) noexcept = default;

int32_t Sampler::sufficient_top(const SamplingParams& params, int64_t vocab_size) {
  if (is_adjusted(params) || params.logprobs >= 0) return 0;
  if (params.temperature == 0.0f) return 1;
  return params.top_k < vocab_size ? params.top_k : 0;
}

bool Sampler::is_drawn_from_logits(const SamplingParams& params) {
  return !is_adjusted(params) && params.logprobs < 0 && params.typical_p >= 1.0f;
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
  // A row's NaN comes first (TopLogits), and its highest logit otherwise.
  if (!std::isfinite(values.front())) runtime::refuse_logits(values.front());
  SampledToken sampled;
  sampled.token = tokens.front();
  if (params.temperature == 0.0f) return sampled;
  // Candidates go in the order of ids, as the whole row would leave them.
  state_->top.clear();
  for (size_t i = 0; i < needed; ++i) state_->top.emplace_back(tokens[i], values[i]);
  std::sort(state_->top.begin(), state_->top.end());
  state_->adjusted.clear();
  for (const auto& [token, value] : state_->top) state_->adjusted.push_back(value);
  RowDistribution row = state_->scratch.row(values.size());
  runtime::start(row, state_->adjusted, 0);
  state_->narrow(params, row);
  const int32_t place = row.draw(philox_uniform(params.seed, index));
  sampled.token = state_->top[static_cast<size_t>(place)].first;
  return sampled;
}

SampledToken Sampler::sample(std::span<const float> logits, const SamplingParams& params,
                             std::span<const int32_t> prompt, std::span<const int32_t> output,
                             uint64_t index, std::span<const uint32_t> allowed) {
  RowDistribution row = state_->filter(logits, params, prompt, output, allowed);
  SampledToken sampled;
  sampled.token = row.draw(philox_uniform(params.seed, index));
  if (params.logprobs >= 0) state_->add_logprobs(logits, params, sampled);
  return sampled;
}

void Sampler::highest(std::span<const float> logits, std::span<float> values,
                      std::span<int32_t> tokens) {
  const size_t k = std::min({values.size(), tokens.size(), logits.size()});
  if (k == 0) return;
  RowDistribution row = state_->scratch.row(logits.size());
  const auto status = row.from_logits(logits.data(), DType::f32,
                                      static_cast<int64_t>(logits.size()), static_cast<int64_t>(k));
  if (status == ops::RowStatus::nan) {
    values[0] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  row.keep_top_k(static_cast<int64_t>(k));
  state_->top.clear();
  for (int64_t i = 0; i < row.size(); ++i) {
    const auto token = row.ids() == nullptr ? static_cast<int32_t>(i) : row.ids()[i];
    state_->top.emplace_back(token, row.values()[i]);
  }
  std::sort(state_->top.begin(), state_->top.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
  for (size_t i = 0; i < k; ++i) std::tie(tokens[i], values[i]) = state_->top[i];
}

void Sampler::add_logprobs(std::span<const float> logits, const SamplingParams& params,
                           SampledToken& sampled) {
  check_token(sampled.token, logits.size(), "token");
  sampled.top.clear();
  if (params.logprobs >= 0) state_->add_logprobs(logits, params, sampled);
}

void Sampler::distribution(std::span<const float> logits, const SamplingParams& params,
                           std::span<const int32_t> prompt, std::span<const int32_t> output,
                           std::span<float> probabilities, std::span<const uint32_t> allowed) {
  if (probabilities.size() != logits.size()) {
    throw InvalidArgument("[sampling] probabilities: expected " + std::to_string(logits.size()) +
                          " values, got " + std::to_string(probabilities.size()));
  }
  RowDistribution row = state_->filter(logits, params, prompt, output, allowed);
  row.write_probabilities(probabilities.data());
}

}  // namespace effinfer
