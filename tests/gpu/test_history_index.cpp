// The pages that generated rows visit by what earlier rows gave them, chosen on the GPU: the CPU's
// lists, step after step, and its history within what sums and logarithms round.
#include <cmath>
#include <random>
#include <vector>

#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/index_step.h"
#include "gpu/mutations.h"
#include "ops/attention_mass.h"
#include "ops/history_index.h"

namespace effinfer {
namespace {

using ops::HistoryIndexProblem;
using ops::IndexedHead;

constexpr int64_t kStride = 1024;

std::vector<float> network() {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  std::vector<float> weights(static_cast<size_t>(ops::kHistoryWeights));
  for (float& x : weights) x = 0.3f * normal(random);
  return weights;
}

// The histories of two sequences, on the host and on the device, from one step to the next.
class Histories {
 public:
  explicit Histories(const Heads& heads)
      : heads_(heads), network_(network()), network_there_(network_) {
    for (int i = 0; i < 2; ++i) {
      host_.emplace_back(static_cast<size_t>(heads.kv_heads * kStride));
      there_.emplace_back(host_.back());
    }
  }

  HistoryIndexProblem problem() const {
    HistoryIndexProblem p;
    p.every = 7;
    p.pages.planes.name = "history";
    p.pages.keys = 128;
    p.pages.sink_tokens = 64;
    return p;
  }

  std::vector<uint64_t> on_cpu(IndexStep& step, HistoryIndexProblem p) {
    std::vector<ScoredRows> scored;
    for (size_t i = 0; i < 2; ++i) {
      scored.push_back({"history",
                        {host_[i].data(), kStride, heads_.kv_heads, kStride},
                        static_cast<int32_t>(i),
                        1});
    }
    p.network = network_.data();
    p.pages.planes.scored = scored.data();
    p.pages.planes.num_scored = 2;
    return step.on_cpu(p.pages, [&](ThreadPool& pool) { ops::run_alone(p, pool); });
  }
  std::vector<uint64_t> on_gpu(IndexStep& step, HistoryIndexProblem p) {
    std::vector<ops::MassRows> rows;
    for (int32_t i = 0; i < 2; ++i) {
      rows.push_back({there_[static_cast<size_t>(i)].data(), kStride, nullptr, 0, i, 1});
    }
    const DeviceArray<ops::MassRows> rows_there(rows);
    p.network = network_there_.data();
    p.pages.planes.rows = rows_there.data();
    p.pages.planes.num_rows = 2;
    return step.on_gpu(p.pages, {}, [&] { run_on_gpu(p); });
  }
  // A score has the roundings of a logit and of two logarithms.
  void expect_alike() const {
    for (size_t i = 0; i < 2; ++i) {
      const std::vector<float> got = there_[i].values();
      for (size_t at = 0; at < got.size(); ++at) CHECK(std::abs(got[at] - host_[i][at]) < 1e-3f);
    }
  }

 private:
  const Heads heads_;
  const std::vector<float> network_;
  const DeviceArray<float> network_there_;
  std::vector<std::vector<float>> host_;
  std::vector<DeviceArray<float>> there_;
};

TEST("pages and histories are the CPU's, step after step") {
  int turn = 0;
  for (const DType kv : {DType::bf16, DType::f16, DType::i8, DType::f32}) {
    const Heads heads = {kv, turn % 2 == 0 ? 32 : 64, 2, turn % 2 == 0 ? 5 : 2, DType::f32};
    Cache cache(heads, static_cast<uint32_t>(turn + 3));
    cache.add(900);
    cache.add(720);
    cache.upload();
    Histories histories(heads);
    // Rows that follow, drafts over the end of a page, some again, a tree, a gap.
    const std::vector<std::vector<Part>> steps = {
        {{0, 801, 1}, {1, 700, 3}}, {{0, 802, 1}, {1, 706, 6}},         {{0, 808, 6}, {1, 704, 1}},
        {{0, 809, 1}, {1, 705, 1}}, {{0, 812, 2, {1, 3}}, {1, 706, 1}}, {{0, 840, 31}, {1, 707, 1}},
        {{0, 860, 1}, {1, 708, 1}}, {{0, 861, 1}, {1, 300, 1}}};
    for (const std::vector<Part>& parts : steps) {
      IndexStep step(cache, parts, true);
      step.set_scored(turn % 2 == 0 ? 64 : 1);
      HistoryIndexProblem p = histories.problem();
      p.pages.min_tokens = 400;
      p.pages.local_tokens = turn == 1 ? 150 : 0;
      CHECK(histories.on_gpu(step, p) == histories.on_cpu(step, p));
      histories.expect_alike();
    }
    ++turn;
  }
}

TEST("heads of other indices stay as they are, dense ones visit all") {
  const Heads heads = {DType::bf16, 32, 3, 1, DType::f32};
  Cache cache(heads, 3);
  cache.add(600);
  cache.add(500);
  cache.upload();
  Histories histories(heads);
  IndexStep step(cache, {{0, 600, 2}, {1, 500, 1}}, true);
  step.indexed() = {IndexedHead::other, IndexedHead::dense, IndexedHead::chosen};
  const HistoryIndexProblem p = histories.problem();
  CHECK(histories.on_gpu(step, p) == histories.on_cpu(step, p));
  histories.expect_alike();
}

TEST("every barrier is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) check::skip("no race is detected");
  const Heads heads = {DType::bf16, 16, 1, 2, DType::f32};
  Cache cache(heads, 5);
  cache.add(700);
  cache.add_constant(640);
  cache.upload();
  IndexStep step(cache, {{0, 700, 3}, {1, 640, 2}}, true);
  const auto run = [&] {
    Histories histories(heads);
    HistoryIndexProblem p = histories.problem();
    p.every = 2;
    return histories.on_gpu(step, p);
  };
  const std::vector<uint64_t> expected = run();
  expect_every_barrier_matters([&] { return run() == expected; }, 3);
}

TEST("what the kernel cannot do is refused") {
  HistoryIndexProblem p;
  p.pages.kv.dtype = DType::bf16;
  p.pages.kv.head_dim = 64;
  p.pages.kv.num_kv_heads = 1;
  p.pages.num_qo_heads = 129;
  CHECK_THROWS(Unsupported, "these x head_dim above 8192", run_on_gpu(p));
  p.pages.num_qo_heads = 1;
  p.pages.max_kv_len = 4097 * 64;
  CHECK_THROWS(Unsupported, "pages are above 4096", run_on_gpu(p));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
