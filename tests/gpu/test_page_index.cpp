// The pages that generated rows visit, chosen on the GPU: the CPU's lists, and bounds of keys that
// are made once and exactly.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/float16.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/index_step.h"
#include "gpu/mutations.h"
#include "ops/page_index.h"

namespace effinfer {
namespace {

using ops::IndexedHead;
using ops::PageIndexProblem;

constexpr uint16_t kUnmade = 0x5a5a;

// A step of generated rows, for which bounds are kept from one run to the next on the device.
class Rows {
 public:
  Rows(const Cache& cache, const std::vector<Part>& parts) : step_(cache, parts, true) {
    const Heads& heads = cache.heads();
    const size_t pages = cache.key_scales().size() / static_cast<size_t>(64 * heads.kv_heads);
    const size_t bounds = pages * static_cast<size_t>(heads.kv_heads * 2 * heads.dims);
    values_ = DeviceArray<uint16_t>(std::vector<uint16_t>(bounds, kUnmade));
    known_ = DeviceArray<int32_t>(std::vector<int32_t>(pages * stride()));
  }

  std::vector<IndexedHead>& indexed() { return step_.indexed(); }
  std::vector<int32_t> known() const { return known_.values(); }
  std::vector<uint16_t> bounds() const { return values_.values(); }
  // In another layer's place.
  size_t stride() const { return static_cast<size_t>(3 * step_.cache().heads().kv_heads); }

  // Words [list][word].
  std::vector<uint64_t> on_cpu(PageIndexProblem p) {
    return step_.on_cpu(p, [&](ThreadPool& pool) { ops::run_alone(p, pool); });
  }

  // With a row that is of no sequence behind the others.
  std::vector<uint64_t> on_gpu(PageIndexProblem p) {
    p.kv.bounds.values = values_.data();
    p.kv.bounds.known = known_.data();
    p.kv.bounds.known_stride = static_cast<int64_t>(stride());
    return step_.on_gpu(p, {{-1, 0, 0, 0}}, [&] {
      ++p.visits.num_rows;
      run_on_gpu(p);
    });
  }

 private:
  IndexStep step_;
  DeviceArray<uint16_t> values_;
  DeviceArray<int32_t> known_;
};

// Calls check(least, greatest key, bounds) for each dimension of a head of a sequence's pages
// [first, end).
template <class Check>
void for_bounds(const Cache& cache, const std::vector<uint16_t>& bounds, int sequence, int64_t head,
                int64_t first, int64_t end, Check&& check) {
  const Heads& heads = cache.heads();
  const Sequence& s = cache.sequence(sequence);
  for (int64_t page = first; page < end; ++page) {
    const int64_t place = s.pages[static_cast<size_t>(page)] * heads.kv_heads + head;
    for (int64_t d = 0; d < heads.dims; ++d) {
      float least = std::numeric_limits<float>::infinity();
      float most = -least;
      for (int64_t t = 64 * page; t < 64 * (page + 1); ++t) {
        const float scale = s.k_scale[static_cast<size_t>(t * heads.kv_heads + head)];
        const float key = s.k[index_of(t, head, d, heads.kv_heads, heads.dims)] * scale;
        least = std::min(least, key);
        most = std::max(most, key);
      }
      const auto at = static_cast<size_t>(place * 2 * heads.dims + d);
      check(least, most, bounds[at], bounds[at + static_cast<size_t>(heads.dims)]);
    }
  }
}

TEST("lists and bounds are the CPU's, for all types of keys, of drafts and trees") {
  int turn = 0;
  for (const DType kv : {DType::bf16, DType::f16, DType::i8, DType::f32}) {
    for (const int32_t dims : {16, 64, 128}) {
      const int32_t group = 1 + turn % 3;
      Cache cache({kv, dims, 2, group, DType::f32}, static_cast<uint32_t>(turn + 7));
      cache.add(1000);
      cache.add(700);
      cache.add(130);
      cache.upload();
      // One row, drafts over the end of a page, a tree, a short one; the first one's prefix again.
      Rows rows(cache,
                {{0, 1000, 1}, {1, 642, 5}, {1, 700, 4, {1, 3, 5, 11}}, {2, 130, 2}, {0, 800, 1}});
      PageIndexProblem p;
      p.sink_tokens = turn % 2 == 0 ? 64 : 5;
      p.local_tokens = turn % 4 == 1 ? 150 : 0;
      p.keys = turn % 3 * 64;
      p.share = turn % 3 == 0 ? 0.3f : 0.0f;
      CHECK(rows.on_gpu(p) == rows.on_cpu(p));
      const std::vector<uint16_t> bounds = rows.bounds();
      const auto exact = [](float least, float most, uint16_t low, uint16_t high) {
        CHECK_EQ(low, bf16_rounded(least, false));
        CHECK_EQ(high, bf16_rounded(most, true));
      };
      const auto unmade = [](float, float, uint16_t low, uint16_t high) {
        CHECK(low == kUnmade && high == kUnmade);
      };
      for (int64_t head = 0; head < 2; ++head) {
        const int64_t first = p.sink_tokens / 64;
        for_bounds(cache, bounds, 0, head, first, 14, exact);
        for_bounds(cache, bounds, 0, head, 14, 15, unmade);
        for_bounds(cache, bounds, 2, head, 0, 2, unmade);
      }
      ++turn;
    }
  }
}

TEST("bounds that are known are not made again, and forgotten ones are") {
  Cache cache({DType::bf16, 32, 2, 2, DType::f32}, 3);
  cache.add(520);
  cache.upload();
  Rows rows(cache, {{0, 520, 3}});
  PageIndexProblem p;
  p.keys = 128;
  const std::vector<uint64_t> expected = rows.on_gpu(p);
  const std::vector<uint16_t> bounds = rows.bounds();
  // Of pages 0 to 6 both heads asked, each row once.
  int64_t asked = 0;
  for (const int32_t known : rows.known()) asked += known;
  CHECK_EQ(asked, 7 * 2 * 3);
  CHECK(rows.on_gpu(p) == expected);
  CHECK(rows.bounds() == bounds);
  asked = 0;
  for (const int32_t known : rows.known()) asked += known;
  CHECK_EQ(asked, 7 * 2 * 3 * 2);
}

TEST("equal scores go to the first pages, and pages may be none") {
  Cache cache({DType::bf16, 32, 1, 1, DType::f32}, 4);
  cache.add_constant(640);
  cache.upload();
  Rows rows(cache, {{0, 640, 1}});
  PageIndexProblem p;
  p.keys = 192;
  const std::vector<uint64_t> words = rows.on_gpu(p);
  for (size_t i = 0; i < 10; ++i) CHECK_EQ(words[i], i < 3 || i >= 8 ? ~uint64_t{0} : uint64_t{0});
  p.keys = 0;
  const std::vector<uint64_t> none = rows.on_gpu(p);
  for (size_t i = 0; i < 10; ++i) CHECK_EQ(none[i], i >= 8 ? ~uint64_t{0} : uint64_t{0});
}

TEST("heads of other indices stay as they are, dense ones and short sequences visit all") {
  Cache cache({DType::bf16, 32, 3, 1, DType::f32}, 3);
  cache.add(600);
  cache.add(300);
  cache.upload();
  Rows rows(cache, {{0, 600, 2}, {1, 300, 1}});
  rows.indexed() = {IndexedHead::other, IndexedHead::dense, IndexedHead::chosen};
  PageIndexProblem p;
  p.keys = 64;
  p.min_tokens = 400;
  CHECK(rows.on_gpu(p) == rows.on_cpu(p));
  // Of heads that choose alone, of the sequence that is long enough.
  const std::vector<int32_t> known = rows.known();
  for (size_t i = 0; i < known.size(); ++i) {
    const size_t place = i % rows.stride();
    if (place != 2) CHECK_EQ(known[i], 0);
  }
  for (const int32_t page : cache.sequence(1).pages) {
    CHECK_EQ(known[static_cast<size_t>(page) * rows.stride() + 2], 0);
  }
}

TEST("every barrier is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) check::skip("no race is detected");
  Cache cache({DType::bf16, 32, 1, 3, DType::f32}, 5);
  cache.add(1000);
  cache.add_constant(640);
  cache.upload();
  Rows rows(cache, {{0, 1000, 2}, {1, 640, 1}});
  PageIndexProblem p;
  p.keys = 192;
  const std::vector<uint64_t> expected = rows.on_gpu(p);
  expect_every_barrier_matters([&] { return rows.on_gpu(p) == expected; }, 3);
}

TEST("what the kernel cannot do is refused") {
  PageIndexProblem p;
  p.kv.dtype = DType::bf16;
  p.kv.head_dim = 64;
  p.kv.num_kv_heads = p.num_qo_heads = 1;
  p.max_kv_len = 4097 * 64;
  CHECK_THROWS(Unsupported, "pages above 4096", run_on_gpu(p));
  p.num_qo_heads = 4;
  p.max_kv_len = 3073 * 64;
  CHECK_THROWS(Unsupported, "x pages are above 12288", run_on_gpu(p));
  p.max_kv_len = 64;
  p.num_qo_heads = 129;
  CHECK_THROWS(Unsupported, "head_dim are above 8192", run_on_gpu(p));
  p.num_qo_heads = 1;
  p.kv.head_dim = 24;
  CHECK_THROWS(Unsupported, "not a multiple of 16", run_on_gpu(p));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
