// Guesses of tokens whose draws' numbers are known.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "core/philox.h"
#include "effinfer/sampling.h"
#include "runtime/speculative/drawing.h"
#include "runtime/speculative/foresight.h"

using namespace effinfer;
using namespace effinfer::runtime;

namespace {

// A row of few tokens, so that a draft's candidates are all of them.
struct Row {
  std::vector<float> logits;
  std::vector<float> highest;  // logits, highest first
  std::vector<int32_t> tokens;

  Row(std::mt19937& random, int32_t size, float spread) {
    std::normal_distribution<float> normal(0.0f, spread);
    for (int32_t i = 0; i < size; ++i) {
      logits.push_back(normal(random));
      tokens.push_back(i);
    }
    const auto logit = [&](int32_t token) { return logits[static_cast<size_t>(token)]; };
    std::sort(tokens.begin(), tokens.end(),
              [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
    for (const int32_t token : tokens) highest.push_back(logit(token));
  }
};

SamplingParams random_params(std::mt19937& random) {
  SamplingParams params;
  params.temperature = std::uniform_real_distribution<float>(0.2f, 1.5f)(random);
  if (random() % 2 == 0) params.top_k = 1 + static_cast<int32_t>(random() % 40);
  if (random() % 2 == 0) params.top_p = std::uniform_real_distribution<float>(0.3f, 1.0f)(random);
  params.seed = random();
  return params;
}

// How far the number is from the ends of the share that it falls in; shares of `row` after the
// parameters have narrowed it.
double margin(const Row& row, const SamplingParams& params, double number) {
  std::vector<Draft::Candidate> shares;
  find_candidates(row.highest, row.tokens, params, shares);
  std::sort(shares.begin(), shares.end(),
            [](const auto& a, const auto& b) { return a.token < b.token; });
  double end = 0.0;
  for (const Draft::Candidate& share : shares) {
    const double begin = end;
    end += static_cast<double>(share.probability);
    if (number < end) return std::min(number - begin, end - number);
  }
  return 0.0;
}

}  // namespace

// Of a Laplace distribution of scale s, exp(-d / s) / 2 lies further out than d on either side of
// its mean: a share that reaches d to both sides holds 1 - exp(-d / s), or more once what is
// outside [0, 1] is taken away, and above a half of all it is the best.
TEST("the share that a number falls in is guessed where it is wide enough") {
  std::mt19937 random(1);
  Sampler sampler;
  Guesser guesser;
  std::vector<Likely> likely;
  int wide = 0;
  for (uint64_t index = 0; index < 3000; ++index) {
    const Row row(random, 50, 2.0f);
    const SamplingParams params = random_params(random);
    const int32_t drawn = sampler.sample(row.logits, params, {}, {}, index).token;
    const size_t spread = random() % Foresight::kSpreads.size();
    const Foresight::Firsts firsts =
        guesser.find_drawn(row.highest, row.tokens, {&params, index, spread}, 3, likely);
    CHECK(!likely.empty());
    CHECK(likely.size() <= 3);
    CHECK(likely.front().token == firsts[spread]);
    float sum = 0.0f;
    for (size_t i = 0; i < likely.size(); ++i) {
      CHECK(i == 0 || likely[i - 1].score >= likely[i].score);
      CHECK(likely[i].score >= 0.0f);
      sum += likely[i].score;
    }
    CHECK(sum <= 1.0f + 1e-5f);
    const double distance = margin(row, params, philox_uniform(params.seed, index));
    for (size_t i = 0; i < firsts.size(); ++i) {
      const double held = 1.0 - std::exp(-distance / Foresight::kSpreads[i]);
      // Shares are float32: their bounds may be off by 50 roundings.
      if (held < 0.5 + 1e-3) continue;
      ++wide;
      CHECK(firsts[i] == drawn);
      if (i == spread) CHECK(static_cast<double>(likely.front().score) >= held - 1e-3);
    }
  }
  CHECK(wide > 4000);
}

// Within [0, 1] the density of scale s varies by exp(1 / s) at most.
TEST("the widest spread takes the likeliest") {
  std::mt19937 random(2);
  Guesser guesser;
  std::vector<Likely> likely;
  std::vector<Draft::Candidate> shares;
  int clear = 0;
  for (uint64_t index = 0; index < 1000; ++index) {
    const Row row(random, 40, 3.0f);
    const SamplingParams params = random_params(random);
    find_candidates(row.highest, row.tokens, params, shares);
    const auto firsts = guesser.find_drawn(row.highest, row.tokens, {&params, index, 0}, 1, likely);
    const float ratio =
        shares.size() < 2 ? INFINITY : shares[0].probability / shares[1].probability;
    if (std::log(static_cast<double>(ratio)) < 1.0 / Foresight::kSpreads.back()) continue;
    ++clear;
    CHECK(firsts.back() == row.tokens.front());
  }
  CHECK(clear > 300);
}

TEST("without a draw the likeliest come with their probabilities") {
  Guesser guesser;
  std::vector<Likely> likely;
  const std::vector<float> logits = {1.0f, 0.0f, 0.0f};
  const std::vector<int32_t> tokens = {7, 3, 5};
  guesser.find(logits, tokens, 2, likely);
  CHECK_EQ(likely.size(), size_t{2});
  CHECK(likely[0].token == 7);
  CHECK(likely[1].token == 3);
  const double e = std::exp(1.0);
  CHECK(std::abs(static_cast<double>(likely[0].score) - e / (e + 2.0)) < 1e-6);
  CHECK(std::abs(static_cast<double>(likely[1].score) - 1.0 / (e + 2.0)) < 1e-6);
}

TEST("the spread that is right most often wins") {
  Foresight foresight;
  CHECK(foresight.best() == 0);
  Foresight::Firsts firsts = {1, 2, 3, 4, 5};
  for (int i = 0; i < 3; ++i) foresight.count(firsts, 4);
  CHECK(foresight.best() == 3);
  // What was long ago counts less.
  for (int i = 0; i < 3; ++i) foresight.count(firsts, 2);
  CHECK(foresight.best() == 1);
  for (int i = 0; i < 5; ++i) foresight.count(firsts, 9);
  CHECK(foresight.best() == 1);
}

CHECK_MAIN()
