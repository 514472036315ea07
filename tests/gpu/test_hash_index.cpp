// The keys that generated rows draw by hashes on the GPU: the CPU's lists, and how often each of
// their keys counts. Codes of keys are sums in the CPU's order; a query's are not, but no sum of a
// random hyperplane lies as near 0 as they round.
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/index_step.h"
#include "gpu/mutations.h"
#include "ops/hash_index.h"

namespace effinfer {
namespace {

using ops::HashIndexProblem;
using ops::IndexedHead;

// A step of generated rows, for which codes are kept from one run to the next on the device.
class Rows {
 public:
  Rows(const Cache& cache, const std::vector<Part>& parts, int32_t bits, int32_t tables)
      : step_(cache, parts, true, true), heads_(cache.heads()) {
    shape_ = {heads_.group, tables, bits};
    planes_ = ops::hash_planes(shape_, heads_.dims, 5);
    chances_ = ops::hash_chances(shape_);
    for (int32_t i = 0; i < heads_.kv_heads * heads_.dims; ++i) {
      means_.push_back(0.01f * static_cast<float>(i % 7));
    }
    there_ = {DeviceArray<float>(planes_), DeviceArray<float>(chances_),
              DeviceArray<float>(means_)};
    bounds_.code_bits = shape_.planes();
    const size_t pages = cache.key_scales().size() / static_cast<size_t>(64 * heads_.kv_heads);
    const auto heads = static_cast<size_t>(heads_.kv_heads);
    codes_ = DeviceArray<uint64_t>(pages * heads * static_cast<size_t>(shape_.planes()));
    known_ = DeviceArray<int32_t>(std::vector<int32_t>(pages * heads));
    bounds_.values = reinterpret_cast<uint16_t*>(codes_.data());
    bounds_.known = known_.data();
    bounds_.known_stride = heads_.kv_heads;
  }

  IndexStep& step() { return step_; }
  std::vector<uint64_t> on_cpu(HashIndexProblem p) {
    set(p, planes_.data(), chances_.data(), means_.data());
    return step_.on_cpu(p, [&](ThreadPool& pool) { ops::run_alone(p, pool); });
  }
  // With a row that is of no sequence behind the others.
  std::vector<uint64_t> on_gpu(HashIndexProblem p) {
    set(p, there_[0].data(), there_[1].data(), there_[2].data());
    p.kv.bounds = bounds_;
    return step_.on_gpu(p, {{-1, 0, 0, 0}}, [&] {
      ++p.visits.num_rows;
      run_on_gpu(p);
    });
  }
  int64_t asked() const {
    int64_t sum = 0;
    for (const int32_t known : known_.values()) sum += known;
    return sum;
  }

 private:
  void set(HashIndexProblem& p, const float* planes, const float* chances,
           const float* means) const {
    p.tables = shape_;
    p.planes = planes;
    p.chances = chances;
    p.means = means;
  }

  IndexStep step_;
  const Heads heads_;
  ops::HashShape shape_;
  std::vector<float> planes_, chances_, means_;
  std::vector<DeviceArray<float>> there_;
  ops::PageBounds bounds_;
  DeviceArray<uint64_t> codes_;
  DeviceArray<int32_t> known_;
};

// What the CPU has, within what its sums and the logarithm of the chance round.
void expect_alike(Rows& rows, const HashIndexProblem& p) {
  const std::vector<uint64_t> expected = rows.on_cpu(p);
  const std::vector<float> weights = rows.step().log_weights();
  const std::vector<uint8_t> weighted = rows.step().weighted();
  CHECK(rows.on_gpu(p) == expected);
  CHECK(rows.step().weighted() == weighted);
  const size_t slots = weights.size() / weighted.size();
  int64_t drawn = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool visited = (expected[i / 64] >> i % 64 & 1) != 0;
    if (!visited || weighted[i / slots] == 0 || expected[i / 64] == IndexStep::kUntouched) continue;
    CHECK(std::abs(rows.step().log_weights()[i] - weights[i]) < 1e-3f);
    drawn += weights[i] > 0.0f ? 1 : 0;
  }
  CHECK(drawn > 0);
}

TEST("keys and how often they count are the CPU's, of drafts and trees") {
  int turn = 0;
  for (const DType kv : {DType::bf16, DType::f16, DType::i8, DType::f32}) {
    for (const int32_t dims : {16, 64}) {
      const int32_t group = turn % 3 == 0 ? 5 : 1 + turn % 3;
      Cache cache({kv, dims, 2, group, DType::f32}, static_cast<uint32_t>(turn + 7));
      cache.add(1000);
      cache.add(700);
      cache.add(130);
      cache.upload();
      Rows rows(cache,
                {{0, 1000, 1}, {1, 642, 5}, {1, 700, 4, {1, 3, 5, 11}}, {2, 130, 2}, {0, 800, 1}},
                turn % 2 == 0 ? 4 : 6, turn % 2 == 0 ? 8 : 40);
      HashIndexProblem p;
      p.sink_tokens = turn % 2 == 0 ? 64 : 5;
      p.local_tokens = turn % 4 == 1 ? 150 : 0;
      expect_alike(rows, p);
      ++turn;
    }
  }
}

TEST("codes that are known are not made again") {
  Cache cache({DType::bf16, 32, 2, 2, DType::f32}, 3);
  cache.add(520);
  cache.upload();
  Rows rows(cache, {{0, 520, 3}}, 3, 8);
  const std::vector<uint64_t> expected = rows.on_gpu({});
  // Of pages 0 to 6 both heads asked, each row once.
  CHECK_EQ(rows.asked(), 7 * 2 * 3);
  CHECK(rows.on_gpu({}) == expected);
  CHECK_EQ(rows.asked(), 7 * 2 * 3 * 2);
}

TEST("heads of other indices stay as they are, dense ones and short sequences visit all") {
  Cache cache({DType::bf16, 32, 3, 1, DType::f32}, 3);
  cache.add(600);
  cache.add(300);
  cache.upload();
  Rows rows(cache, {{0, 600, 2}, {1, 300, 1}}, 3, 8);
  rows.step().indexed() = {IndexedHead::chosen, IndexedHead::dense, IndexedHead::chosen};
  HashIndexProblem p;
  p.min_tokens = 400;
  expect_alike(rows, p);
  rows.step().indexed()[2] = IndexedHead::other;
  CHECK(rows.on_gpu(p) == rows.on_cpu(p));
}

TEST("every barrier is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) check::skip("no race is detected");
  Cache cache({DType::bf16, 16, 1, 3, DType::f32}, 5);
  cache.add(400);
  cache.upload();
  const auto run = [&] {
    // Whose codes are not known.
    Rows rows(cache, {{0, 400, 2}}, 3, 8);
    return rows.on_gpu({});
  };
  const std::vector<uint64_t> expected = run();
  expect_every_barrier_matters([&] { return run() == expected; }, 3);
}

TEST("what the kernel cannot do is refused") {
  HashIndexProblem p;
  p.kv.dtype = DType::bf16;
  p.kv.head_dim = 64;
  p.kv.num_kv_heads = 1;
  p.num_qo_heads = 129;
  p.tables = {129, 8, 2};
  CHECK_THROWS(Unsupported, "these x head_dim above 8192", run_on_gpu(p));
  p.tables = {16, 256, 8};
  CHECK_THROWS(Unsupported, "x tables x bits are above 16384", run_on_gpu(p));
  p.kv.head_dim = 272;
  CHECK_THROWS(Unsupported, "head_dim is above 256", run_on_gpu(p));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
