// Speculative sampling of chains and token masks on the GPU, against the CPU's operators.
#include <algorithm>
#include <cmath>
#include <random>

#include "gpu/sampling_rows.h"

namespace effinfer {
namespace {

using ops::RowStatus;

struct Chains {
  int64_t rows = 0;
  int64_t drafts = 0;
  int64_t vocab = 0;
  std::vector<float> draft_probs;
  std::vector<int32_t> ids;
  std::vector<float> target_probs;
};

struct Result {
  std::vector<int32_t> tokens, accepted, emitted;
  std::vector<RowStatus> statuses;
  bool operator==(const Result&) const = default;
};

// Distributions over some of the tokens. `like` makes drafts resemble their targets, so that some
// are accepted.
Chains random_chains(int64_t rows, int64_t drafts, int64_t vocab, float like,
                     std::mt19937& random) {
  Chains chains{rows, drafts, vocab, {}, {}, {}};
  const auto at = [&](int64_t i) { return static_cast<size_t>(i); };
  chains.target_probs.resize(at(rows * (drafts + 1) * vocab));
  chains.draft_probs.resize(at(rows * drafts * vocab));
  chains.ids.resize(at(rows * drafts));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i <= drafts; ++i) {
      float* target = &chains.target_probs[at((row * (drafts + 1) + i) * vocab)];
      float total = 0.0f;
      for (int64_t t = 0; t < vocab; ++t) {
        target[t] = random() % 3 == 0 ? 0.0f : static_cast<float>(random() % 1000);
        total += target[t];
      }
      if (total == 0.0f) target[0] = total = 1.0f;
      for (int64_t t = 0; t < vocab; ++t) target[t] /= total;
      if (i == drafts) continue;
      float* draft = &chains.draft_probs[at((row * drafts + i) * vocab)];
      for (int64_t t = 0; t < vocab; ++t) {
        const auto other =
            static_cast<float>(random() % 1000) / (500.0f * static_cast<float>(vocab));
        draft[t] = like * target[t] + (1.0f - like) * other;
      }
      chains.ids[at(row * drafts + i)] = static_cast<int32_t>(random() % at(vocab));
    }
  }
  return chains;
}

ops::ChainSpeculationProblem problem_of(const Chains& chains, uint64_t seed) {
  ops::ChainSpeculationProblem p;
  p.rows = chains.rows;
  p.drafts = chains.drafts;
  p.vocab = chains.vocab;
  p.random.seed.value = seed;
  return p;
}

Result on_cpu(const Chains& chains, uint64_t seed) {
  ops::ChainSpeculationProblem p = problem_of(chains, seed);
  const auto rows = static_cast<size_t>(chains.rows);
  Result got{std::vector<int32_t>(rows * static_cast<size_t>(chains.drafts + 1)),
             std::vector<int32_t>(rows, 5), std::vector<int32_t>(rows, 7),
             std::vector<RowStatus>(rows)};
  p.draft_probs = chains.draft_probs.data();
  p.draft_ids = chains.ids.data();
  p.target_probs = chains.target_probs.data();
  p.tokens = got.tokens.data();
  p.accepted = got.accepted.data();
  p.emitted = got.emitted.data();
  p.statuses = got.statuses.data();
  ops::run_alone(p, pool());
  return got;
}

Result on_gpu(const Chains& chains, uint64_t seed) {
  ops::ChainSpeculationProblem p = problem_of(chains, seed);
  const auto rows = static_cast<size_t>(chains.rows);
  const DeviceArray<float> drafts(chains.draft_probs);
  const DeviceArray<int32_t> ids(chains.ids);
  const DeviceArray<float> targets(chains.target_probs);
  const DeviceArray<int32_t> tokens(rows * static_cast<size_t>(chains.drafts + 1));
  const DeviceArray<int32_t> accepted(std::vector<int32_t>(rows, 5));
  const DeviceArray<int32_t> emitted(std::vector<int32_t>(rows, 7));
  const DeviceArray<RowStatus> statuses(rows);
  p.draft_probs = drafts.data();
  p.draft_ids = ids.data();
  p.target_probs = targets.data();
  p.tokens = tokens.data();
  p.accepted = accepted.data();
  p.emitted = emitted.data();
  p.statuses = statuses.data();
  run_on_gpu(p);
  return {tokens.values(), accepted.values(), emitted.values(), statuses.values()};
}

TEST("the CPU's tokens and counts") {
  std::mt19937 random(1);
  for (const int64_t vocab : {1, 7, 64, 1001, 5000}) {
    for (const int64_t drafts : {0, 1, 4}) {
      for (const float like : {0.0f, 0.7f, 1.0f}) {
        const Chains chains = random_chains(3, drafts, vocab, like, random);
        const uint64_t seed = random();
        const Result cpu = on_cpu(chains, seed);
        const Result gpu = on_gpu(chains, seed);
        CHECK(cpu.statuses == gpu.statuses);
        CHECK(cpu == gpu);
      }
    }
  }
}

TEST("more drafts than a block has threads") {
  std::mt19937 random(2);
  const Chains chains = random_chains(1, 700, 4, 1.0f, random);
  CHECK(on_cpu(chains, 3) == on_gpu(chains, 3));
}

TEST("rows without a distribution") {
  std::mt19937 random(3);
  Chains chains = random_chains(6, 1, 40, 0.0f, random);
  const auto target = [&](size_t row, size_t i) {
    return &chains.target_probs[(row * 2 + i) * 40];
  };
  chains.draft_probs[static_cast<size_t>(chains.ids[0])] = kNan;
  target(1, 0)[3] = kNan;
  std::fill_n(target(2, 0), 80, 0.0f);
  std::fill_n(&chains.draft_probs[3 * 40], 40, 1.0f);  // leaves nothing of its target
  target(4, 0)[5] = kInfinity;
  target(5, 0)[2] = target(5, 1)[2] = -1.0f;
  for (uint64_t seed = 0; seed < 4; ++seed) CHECK(on_cpu(chains, seed) == on_gpu(chains, seed));
}

TEST("every barrier is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) check::skip("no race is detected");
  std::mt19937 random(4);
  const Chains chains = random_chains(2, 3, 3000, 0.3f, random);
  Chains same = chains;
  std::copy_n(same.target_probs.begin(), 3000, same.draft_probs.begin());
  same.draft_probs[static_cast<size_t>(same.ids[0])] += 1.0f;
  const Result expected = on_cpu(chains, 9);
  expect_every_barrier_matters([&] { return on_gpu(chains, 9) == expected; });
}

TEST("forbidden tokens are negative infinity, others what they were") {
  std::mt19937 random(5);
  for (const DType dtype : kRowTypes) {
    for (const int64_t vocab : {1, 31, 32, 33, 5000}) {
      constexpr int64_t kRows = 3;
      const std::vector<float> x = rounded(dtype, normals(kRows * vocab, random));
      const int64_t words = (vocab + 31) / 32;
      std::vector<int32_t> mask(static_cast<size_t>(kRows * words));
      for (int32_t& word : mask) word = static_cast<int32_t>(random() & random());
      for (const bool some : {false, true}) {
        const FloatRows there(dtype, x);
        const DeviceArray<int32_t> mask_there(mask);
        const DeviceArray<int64_t> indices(std::vector<int64_t>{2, 0});
        ops::TokenBitmaskProblem p{there.data(), dtype, mask_there.data(), vocab, kRows, nullptr};
        if (some) {
          p.rows = 2;
          p.indices = indices.data();
        }
        run_on_gpu(p);
        std::vector<float> expected = x;
        for (int64_t i = 0; i < kRows * vocab; ++i) {
          const int64_t row = i / vocab;
          const int64_t token = i % vocab;
          if (some && row == 1) continue;
          const auto word =
              static_cast<uint32_t>(mask[static_cast<size_t>(row * words + token / 32)]);
          if ((word >> token % 32 & 1) == 0) expected[static_cast<size_t>(i)] = -kInfinity;
        }
        CHECK(same_bits(there.values(), expected));
      }
    }
  }
}

TEST("nothing to do") {
  run_on_gpu(ops::ChainSpeculationProblem{});
  run_on_gpu(ops::TokenBitmaskProblem{});
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
