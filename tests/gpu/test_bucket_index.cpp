// The keys that blocks of a prompt visit by buckets and by chance, on the GPU: the CPU's lists, and
// how often each of their keys counts. The mean that keys lose is a sum in another order; no sum of
// a random hyperplane lies as near 0 as it rounds.
#include <cmath>
#include <vector>

#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/index_step.h"
#include "gpu/mutations.h"
#include "ops/bucket_index.h"

namespace effinfer {
namespace {

using ops::BucketIndexProblem;
using ops::IndexedHead;

class Prompts {
 public:
  Prompts(const Cache& cache, const std::vector<Part>& parts)
      : step_(cache, parts, false, true),
        planes_(ops::hash_planes(ops::kBucketPlanes, cache.heads().dims, 5)),
        there_(planes_) {}

  IndexStep& step() { return step_; }
  std::vector<uint64_t> on_cpu(BucketIndexProblem p) {
    p.planes = planes_.data();
    return step_.on_cpu(p, [&](ThreadPool& pool) { ops::run_alone(p, pool); });
  }
  std::vector<uint64_t> on_gpu(BucketIndexProblem p) {
    const ops::VisitPlan& plan = step_.plan();
    const DeviceArray<ops::VisitSequence> sequences(
        std::vector<ops::VisitSequence>(plan.sequences, plan.sequences + plan.num_sequences));
    const DeviceArray<std::byte> buckets(static_cast<size_t>(
        plan.num_sequences * plan.num_kv_heads * ops::bucket_bytes(plan.list_words)));
    p.planes = there_.data();
    return step_.on_gpu(p, {}, [&] {
      p.visits.sequences = sequences.data();
      p.visits.buckets = buckets.data();
      run_on_gpu(p);
    });
  }

 private:
  IndexStep step_;
  const std::vector<float> planes_;
  const DeviceArray<float> there_;
};

void expect_alike(Prompts& prompts, const BucketIndexProblem& p) {
  const std::vector<uint64_t> expected = prompts.on_cpu(p);
  const std::vector<float> weights = prompts.step().log_weights();
  const std::vector<uint8_t> weighted = prompts.step().weighted();
  CHECK(prompts.on_gpu(p) == expected);
  CHECK(prompts.step().weighted() == weighted);
  const size_t slots = weights.size() / weighted.size();
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool visited = (expected[i / 64] >> i % 64 & 1) != 0;
    if (!visited || weighted[i / slots] == 0 || expected[i / 64] == IndexStep::kUntouched) continue;
    CHECK(std::abs(prompts.step().log_weights()[i] - weights[i]) < 1e-5f);
  }
}

TEST("keys and how often they count are the CPU's") {
  int turn = 0;
  for (const DType kv : {DType::bf16, DType::f16, DType::i8, DType::f32}) {
    for (const int32_t dims : {16, 64}) {
      const int32_t group = turn % 3 == 0 ? 5 : 1 + turn % 3;
      Cache cache({kv, dims, 2, group, DType::f32}, static_cast<uint32_t>(turn + 7));
      cache.add(900);
      cache.add(700);
      cache.add_constant(400);
      cache.upload();
      Prompts prompts(cache, {{0, 900, 130}, {1, 700, 200}, {2, 400, 64}, {1, 500, 500}});
      BucketIndexProblem p;
      p.bits = turn % 2 == 0 ? 8 : 4;
      p.keys = turn % 4 == 3 ? 0 : 100;
      p.samples = turn % 4 == 2 ? 0 : 70;
      p.sink_tokens = turn % 3 == 0 ? 5 : 130;
      p.local_tokens = turn % 3 == 1 ? 90 : 0;
      p.min_tokens = turn % 4 == 1 ? 450 : 0;
      p.seed = 11;
      p.layer = turn;
      expect_alike(prompts, p);
      ++turn;
    }
  }
}

TEST("pages of long prompts are numbered over several turns") {
  Cache cache({DType::bf16, 16, 1, 1, DType::f32}, 8);
  cache.add(600 * 64);
  cache.upload();
  Prompts prompts(cache, {{0, 600 * 64, 64}});
  BucketIndexProblem p;
  p.keys = 1000;
  p.samples = 3000;
  expect_alike(prompts, p);
}

TEST("heads of other indices stay as they are, dense ones visit all") {
  Cache cache({DType::bf16, 32, 3, 1, DType::f32}, 3);
  cache.add(600);
  cache.upload();
  Prompts prompts(cache, {{0, 600, 200}});
  prompts.step().indexed() = {IndexedHead::chosen, IndexedHead::dense, IndexedHead::chosen};
  BucketIndexProblem p;
  p.keys = 64;
  p.samples = 20;
  expect_alike(prompts, p);
  prompts.step().indexed()[2] = IndexedHead::other;
  CHECK(prompts.on_gpu(p) == prompts.on_cpu(p));
}

TEST("every barrier is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) check::skip("no race is detected");
  Cache cache({DType::bf16, 16, 1, 2, DType::f32}, 5);
  cache.add(500);
  cache.add_constant(400);
  cache.upload();
  Prompts prompts(cache, {{0, 500, 64}, {1, 400, 64}});
  BucketIndexProblem p;
  p.keys = 90;
  p.samples = 30;
  const std::vector<uint64_t> expected = prompts.on_gpu(p);
  expect_every_barrier_matters([&] { return prompts.on_gpu(p) == expected; }, 3);
}

TEST("what the kernel cannot do is refused") {
  BucketIndexProblem p;
  p.kv.dtype = DType::bf16;
  p.kv.head_dim = 64;
  p.kv.num_kv_heads = 1;
  p.num_qo_heads = 129;
  CHECK_THROWS(Unsupported, "these x head_dim above 8192", run_on_gpu(p));
  p.kv.head_dim = 24;
  CHECK_THROWS(Unsupported, "not a multiple of 16", run_on_gpu(p));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
