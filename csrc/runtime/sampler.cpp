#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "core/philox.h"
#include "effinfer/error.h"
#include "effinfer/sampling.h"
#include "runtime/adjusted_logits.h"
#include "runtime/row_scratch.h"

namespace effinfer {
namespace {

using cpu::RowDistribution;

// Numbers the draws of a token: 0 chooses it, verifiers take 1 and the next.
constexpr uint32_t kXtcDraw = ~uint32_t{0};

struct Candidate {
  double distance;  // those with the least are kept: of -log p from the entropy, or -log p
  double weight;
  int64_t place;
};

bool nearer(const Candidate& a, const Candidate& b) {
  return a.distance != b.distance ? a.distance < b.distance : a.place < b.place;
}

// Keeps the first candidates that hold `mass`, at least one, the nearest first and the lower place
// among equals. Sorts only as far as needed: a block, then the next of twice the size.
void keep_mass(double mass, std::vector<Candidate>& candidates) {
  double sum = 0.0;
  size_t first = 0;
  for (size_t block = 64; first < candidates.size(); block *= 2) {
    const size_t last = std::min(first + block, candidates.size());
    const auto begin = candidates.begin() + static_cast<ptrdiff_t>(first);
    const auto end = candidates.begin() + static_cast<ptrdiff_t>(last);
    if (end != candidates.end()) std::nth_element(begin, end, candidates.end(), nearer);
    std::sort(begin, end, nearer);
    for (; first < last; ++first) {
      sum += candidates[first].weight;
      if (sum >= mass) {
        candidates.resize(first + 1);
        return;
      }
    }
  }
}

// Mirostat 1 (Basu et al. 2021, algorithm 1): how many tokens to keep so that the surprise of a
// draw is expected at most at `most_bits`, where probabilities fall as a power of the rank. The
// exponent is estimated from the likeliest 100; `likeliest` has at least two.
size_t mirostat_count(std::span<const Candidate> likeliest, size_t vocab_size, double most_bits) {
  const auto vocab = static_cast<double>(vocab_size);
  double products = 0.0;
  double squares = 0.0;
  for (size_t i = 0; i + 1 < likeliest.size(); ++i) {
    const auto rank = static_cast<double>(i + 1);
    const double t = std::log((rank + 1.0) / rank);
    products += t * (likeliest[i + 1].distance - likeliest[i].distance);
    squares += t * t;
  }
  const double exponent = products / squares;
  const double epsilon = exponent - 1.0;
  const double count =
      std::pow(epsilon * std::exp2(most_bits) / (1.0 - std::pow(vocab, -epsilon)), 1.0 / exponent);
  // An exponent of 1 has no such number: all are kept.
  if (!(count < vocab)) return vocab_size;
  return static_cast<size_t>(std::max(count, 1.0));
}

bool has_surprise(const SamplingParams& params) {
  return params.mirostat != 0 && params.temperature > 0.0f;
}

// What mirostat lets the next token surprise by, in bits.
double mirostat_bound(const SamplingParams& params, const Mirostat* mirostat) {
  const double begin = 2.0 * static_cast<double>(params.mirostat_tau);
  return mirostat == nullptr ? begin : mirostat->most_bits.value_or(begin);
}

double weight_of(const RowDistribution& row, int32_t token) {
  if (row.ids() == nullptr) return static_cast<double>(row.values()[token]);
  const int32_t* end = row.ids() + row.size();
  return static_cast<double>(row.values()[std::lower_bound(row.ids(), end, token) - row.ids()]);
}

}  // namespace

struct Sampler::State {
  explicit State(Isa isa) : scratch(isa) {}

  runtime::RowScratch scratch;
  runtime::LogitAdjuster adjuster;
  std::vector<Candidate> candidates;
  std::vector<float> values;
  std::vector<std::pair<int32_t, float>> top;

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
    keep_candidates(row);
  }

  void keep_candidates(RowDistribution& row) {
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.place < b.place; });
    row.keep_places(candidates.size(), [this](size_t i) { return candidates[i].place; });
  }

  // Exclude top choices: of the tokens that have the probability `threshold` only the least likely
  // stays. Ties go to the highest id.
  void exclude_top(float threshold, RowDistribution& row) {
    const double least = static_cast<double>(threshold) * row.total();
    const auto is_likely = [&](double weight) { return weight > 0.0 && weight >= least; };
    int64_t kept = -1;
    size_t count = 0;
    for (int64_t i = 0; i < row.size(); ++i) {
      if (!is_likely(static_cast<double>(row.values()[i]))) continue;
      ++count;
      if (kept < 0 || row.values()[i] <= row.values()[kept]) kept = i;
    }
    if (count < 2) return;
    candidates.clear();
    for (int64_t i = 0; i < row.size(); ++i) {
      const auto weight = static_cast<double>(row.values()[i]);
      if (i == kept || !is_likely(weight)) candidates.push_back({0.0, weight, i});
    }
    row.keep_places(candidates.size(), [this](size_t i) { return candidates[i].place; });
  }

  // Keeps the tokens whose surprise, -log2 p, is at most mirostat's bound, and at least one.
  void keep_unsurprising(const SamplingParams& params, double most_bits, size_t vocab,
                         RowDistribution& row) {
    constexpr size_t kEstimated = 100;
    const double log_total = std::log(row.total());
    candidates.clear();
    for (int64_t i = 0; i < row.size(); ++i) {
      const auto weight = static_cast<double>(row.values()[i]);
      if (weight > 0.0) candidates.push_back({log_total - std::log(weight), weight, i});
    }
    size_t count = candidates.size();
    if (params.mirostat == 1 && count > 1) {
      const size_t likeliest = std::min(kEstimated, count);
      std::partial_sort(candidates.begin(), candidates.begin() + static_cast<ptrdiff_t>(likeliest),
                        candidates.end(), nearer);
      count =
          std::min(count, mirostat_count(std::span(candidates).first(likeliest), vocab, most_bits));
    } else if (params.mirostat == 2) {
      const double most = most_bits * std::log(2.0);
      const auto fits = [most](const Candidate& c) { return c.distance <= most; };
      const auto nearest = std::min_element(candidates.begin(), candidates.end(), nearer);
      std::swap(candidates.front(), *nearest);
      const auto end = std::partition(candidates.begin() + 1, candidates.end(), fits);
      count = static_cast<size_t>(end - candidates.begin());
    }
    if (count == candidates.size()) return;
    if (params.mirostat == 1) {
      std::nth_element(candidates.begin(), candidates.begin() + static_cast<ptrdiff_t>(count),
                       candidates.end(), nearer);
    }
    candidates.resize(count);
    keep_candidates(row);
  }

  // Applies the filters that follow top-k, but for mirostat.
  void narrow(const SamplingParams& params, uint64_t index, RowDistribution& row) {
    row.to_weights(params.temperature);
    if (params.typical_p < 1.0f) keep_typical(params.typical_p, row);
    row.keep_top_p(params.top_p);
    if (params.min_p > 0.0f) row.keep_min_p(params.min_p);
    if (params.xtc_probability > 0.0f && philox_uniform(params.seed, index, 0, kXtcDraw) <
                                             static_cast<double>(params.xtc_probability)) {
      exclude_top(params.xtc_threshold, row);
    }
  }

  // Leaves the distribution that mirostat narrows, or that is drawn from.
  RowDistribution filter(std::span<const float> logits, const SamplingParams& params,
                         std::span<const int32_t> prompt, std::span<const int32_t> output,
                         uint64_t index, std::span<const uint32_t> allowed) {
    const std::span<const float> row_logits =
        adjuster.adjust(logits, params, prompt, output, allowed);
    RowDistribution row = scratch.row(logits.size());
    const bool greedy = params.temperature == 0.0f;
    const int64_t k = greedy ? 1 : params.top_k;
    runtime::start(row, row_logits, k);
    if (k > 0) row.keep_top_k(k);
    if (greedy) {
      row.to_weights(1.0f);
    } else {
      narrow(params, index, row);
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
  if (!params.is_plain()) return 0;
  if (params.temperature == 0.0f) return 1;
  return params.top_k < vocab_size ? params.top_k : 0;
}

bool Sampler::is_drawn_from_logits(const SamplingParams& params) {
  return params.is_plain() && params.typical_p >= 1.0f;
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
  state_->values.clear();
  for (const auto& [token, value] : state_->top) state_->values.push_back(value);
  RowDistribution row = state_->scratch.row(values.size());
  runtime::start(row, state_->values, 0);
  state_->narrow(params, index, row);
  const int32_t place = row.draw(philox_uniform(params.seed, index));
  sampled.token = state_->top[static_cast<size_t>(place)].first;
  return sampled;
}

SampledToken Sampler::sample(std::span<const float> logits, const SamplingParams& params,
                             std::span<const int32_t> prompt, std::span<const int32_t> output,
                             uint64_t index, std::span<const uint32_t> allowed,
                             Mirostat* mirostat) {
  RowDistribution row = state_->filter(logits, params, prompt, output, index, allowed);
  const bool has_mirostat = has_surprise(params);
  const double most_bits = mirostat_bound(params, mirostat);
  const double total = has_mirostat ? row.total() : 0.0;
  if (has_mirostat) state_->keep_unsurprising(params, most_bits, logits.size(), row);
  SampledToken sampled;
  sampled.token = row.draw(philox_uniform(params.seed, index));
  if (has_mirostat && mirostat != nullptr) {
    const double bits = std::log2(total / weight_of(row, sampled.token));
    mirostat->most_bits = most_bits - static_cast<double>(params.mirostat_eta) *
                                          (bits - static_cast<double>(params.mirostat_tau));
  }
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
  runtime::check_token(sampled.token, logits.size(), "token");
  sampled.top.clear();
  if (params.logprobs >= 0) state_->add_logprobs(logits, params, sampled);
}

void Sampler::distribution(std::span<const float> logits, const SamplingParams& params,
                           std::span<const int32_t> prompt, std::span<const int32_t> output,
                           std::span<float> probabilities, std::span<const uint32_t> allowed,
                           uint64_t index, const Mirostat* mirostat) {
  if (probabilities.size() != logits.size()) {
    throw InvalidArgument("[sampling] probabilities: expected " + std::to_string(logits.size()) +
                          " values, got " + std::to_string(probabilities.size()));
  }
  RowDistribution row = state_->filter(logits, params, prompt, output, index, allowed);
  if (has_surprise(params)) {
    state_->keep_unsurprising(params, mirostat_bound(params, mirostat), logits.size(), row);
  }
  row.write_probabilities(probabilities.data());
}

}  // namespace effinfer
