// The parts of sampling that Python does not see; its results are tested in tests/runtime.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/sampling.h"
#include "core/philox.h"
#include "runtime/row_math.h"

using namespace effinfer;

// Known answers of the authors' Random123 distribution (kat_vectors).
TEST("philox4x32-10 gives its published numbers") {
  const PhiloxCounter zero = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == zero);
  const uint32_t f = 0xffffffff;
  const PhiloxCounter ones = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
  CHECK(philox4x32({f, f, f, f}, {f, f}) == ones);
  const PhiloxCounter pi = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                            {0xa4093822, 0x299f31d0}) == pi);
}

TEST("exp is within two ulp of the true value, and 0 far down") {
  for (float x = 0.0f; x > -87.0f; x -= 0.0137f) {
    const double exact = std::exp(static_cast<double>(x));
    const double error = std::abs(static_cast<double>(runtime::exp_nonpositive(x)) - exact);
    CHECK(error <= 2 * exact * static_cast<double>(std::numeric_limits<float>::epsilon()));
  }
  CHECK_EQ(runtime::exp_nonpositive(0.0f), 1.0f);
  CHECK_EQ(runtime::exp_nonpositive(-100.0f), 0.0f);
  CHECK_EQ(runtime::exp_nonpositive(-std::numeric_limits<float>::infinity()), 0.0f);
}

TEST("row passes agree with plain loops at every length") {
  for (size_t size = 1; size < 70; ++size) {
    std::vector<float> row(size);
    for (size_t i = 0; i < size; ++i) row[i] = static_cast<float>((i * 37 + size) % 23) - 30.0f;
    float max = row[0];
    double sum = 0.0;
    for (const float x : row) max = std::max(max, x);
    for (const float x : row) sum += std::exp(static_cast<double>(x - max));
    CHECK_EQ(runtime::checked_max(row), max);
    CHECK(std::abs(runtime::exp_sum(row, max, nullptr) - sum) <= 1e-6 * sum);
    row[size - 1] = std::nanf("");
    CHECK_THROWS(InvalidArgument, "NaN", runtime::checked_max(row));
  }
}

TEST("greedy takes the lowest id among equals") {
  std::vector<float> row(100, 1.0f);
  row[41] = row[40] = 2.0f;
  SamplingParams params;
  params.temperature = 0.0f;
  CHECK_EQ(Sampler().sample(row, params, {}, {}, 0).token, 40);
}

TEST("the highest logits alone give the token that all logits give") {
  uint32_t state = 7;
  const auto next = [&state] {
    return static_cast<float>((state = state * 1664525 + 1013904223) >> 8);
  };
  Sampler sampler;
  for (int round = 0; round < 200; ++round) {
    std::vector<float> row(500);
    for (float& x : row) x = std::floor(next() * 0x1p-20f) * 0.25f;  // with many ties
    SamplingParams params;
    params.temperature = round % 5 == 0 ? 0.0f : 0.1f + next() * 0x1p-23f;
    params.top_k = 1 + round % 60;
    if (round % 3 == 0) params.top_p = 0.8f;
    if (round % 4 == 0) params.min_p = 0.05f;
    if (round % 7 == 0) params.typical_p = 0.9f;
    params.seed = static_cast<uint64_t>(round);
    std::vector<int32_t> order(row.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return row[static_cast<size_t>(a)] > row[static_cast<size_t>(b)];
    });
    order.resize(64);  // more than needed
    std::vector<float> values;
    for (const int32_t token : order) values.push_back(row[static_cast<size_t>(token)]);
    const auto index = static_cast<uint64_t>(round % 11);
    CHECK_EQ(sampler.sample_top(values, order, params, index).token,
             sampler.sample(row, params, {}, {}, index).token);
  }
}

TEST("how many logits sampling needs") {
  SamplingParams params;
  CHECK_EQ(Sampler::sufficient_top(params, 100), 0);
  params.top_k = 40;
  CHECK_EQ(Sampler::sufficient_top(params, 100), 40);
  CHECK_EQ(Sampler::sufficient_top(params, 40), 0);
  params.temperature = 0.0f;
  CHECK_EQ(Sampler::sufficient_top(params, 100), 1);
  params.logprobs = 0;
  CHECK_EQ(Sampler::sufficient_top(params, 100), 0);
  params.logprobs = -1;
  params.presence_penalty = 0.5f;
  CHECK_EQ(Sampler::sufficient_top(params, 100), 0);
  params = {};
  params.top_k = 3;
  const std::vector<float> values = {2.0f, 1.0f};
  const std::vector<int32_t> tokens = {5, 9};
  CHECK_THROWS(InvalidArgument, "at least 3", Sampler().sample_top(values, tokens, params, 0));
  params.top_k = 2;
  const std::vector<float> broken = {std::nanf(""), 1.0f};
  CHECK_THROWS(InvalidArgument, "NaN", Sampler().sample_top(broken, tokens, params, 0));
}

CHECK_MAIN()
