// The parts of sampling that Python does not see; its results are tested in tests/runtime.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "core/philox.h"
#include "cpu/level.h"
#include "cpu/row_distribution.h"
#include "effinfer/error.h"
#include "effinfer/sampling.h"

using namespace effinfer;
using cpu::RowDistribution;
using cpu::RowMath;

// Known answers of the authors' Random123 distribution (kat_vectors).
TEST("philox4x32-10 gives its published numbers") {
  const PhiloxCounter zero = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == zero);
  const uint32_t f = 0xffffffff;
  const PhiloxCounter ones = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
  CHECK(philox4x32({f, f, f, f}, {f, f}) == ones);
  const PhiloxCounter pi = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        pi);
}

// One row through the passes of a level.
struct Row {
  explicit Row(int64_t size) : memory(RowDistribution::scratch_bytes(size) / 64 + 1) {}
  RowDistribution at(const RowMath& math, int64_t size) { return {math, memory.data(), size}; }
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> memory;
};

std::vector<Isa> levels() {
  std::vector<Isa> all;
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (isa <= current_isa()) all.push_back(isa);
  }
  return all;
}

TEST("weights are within two ulp of exp, 0 far down, and the same bits at every level") {
  std::vector<float> x = {0.0f, -100.0f, -std::numeric_limits<float>::infinity()};
  for (float value = 0.0f; value > -87.0f; value -= 0.0137f) x.push_back(value);
  const auto size = static_cast<int64_t>(x.size());
  std::vector<float> first(x.size());
  Row memory(size);
  for (const Isa isa : levels()) {
    RowDistribution row = memory.at(cpu::kernels_at<cpu::RowMath>(isa), size);
    CHECK(row.from_logits(x.data(), DType::f32, size) == ops::RowStatus::ok);
    row.to_weights(1.0f);
    double sum = 0.0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = x[i] > -87.0f ? std::exp(static_cast<double>(x[i])) : 0.0;
      const double error = std::abs(static_cast<double>(row.values()[i]) - exact);
      CHECK(error <= 2 * exact * static_cast<double>(std::numeric_limits<float>::epsilon()));
      sum += exact;
    }
    CHECK(std::abs(row.total() - sum) <= 1e-6 * sum);
    if (isa == Isa::portable) std::copy_n(row.values(), x.size(), first.begin());
    CHECK(std::equal(first.begin(), first.end(), row.values()));
  }
}

TEST("a cut keeps its head at every length and level") {
  for (int64_t size = 1; size < 70; ++size) {
    std::vector<float> x(static_cast<size_t>(size));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 37 % 23);
    Row memory(size);
    for (const Isa isa : levels()) {
      for (int64_t k = 1; k <= size; ++k) {
        RowDistribution row = memory.at(cpu::kernels_at<cpu::RowMath>(isa), size);
        CHECK(row.from_weights(x.data(), DType::f32, size) == ops::RowStatus::ok || size == 1);
        row.keep_top_k(k);
        CHECK_EQ(row.size(), k);
        for (int64_t i = 0; i < k && row.ids() != nullptr; ++i) {
          const int32_t id = row.ids()[i];
          CHECK_EQ(row.values()[i], x[static_cast<size_t>(id)]);
          int64_t before = 0;
          for (int32_t j = 0; j < size; ++j) {
            const float a = x[static_cast<size_t>(j)], b = x[static_cast<size_t>(id)];
            before += a > b || (a == b && j < id);
          }
          CHECK(before < k);
        }
      }
    }
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
