// The keys that generated rows visit, chosen on the GPU, in units by bounds and means or singly:
// the CPU's lists, and bounds of keys that are made once and exactly.
//
// Scores are sums in another order than the CPU's: what is chosen of random keys lies further apart
// than they round. Means are rounded to bf16 after such a sum, so that one may round the other way,
// and a unit be chosen in place of one that is hardly before it.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/float16.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/index_step.h"
#include "gpu/mutations.h"
#include "ops/attention_mass.h"
#include "ops/page_index.h"

namespace effinfer {
namespace {

using ops::IndexedHead;
using ops::PageIndexProblem;

constexpr uint16_t kUnmade = 0x5a5a;

// A step of generated rows, for which bounds are kept from one run to the next on the device.
class Rows {
 public:
  Rows(const Cache& cache, const std::vector<Part>& parts, int64_t unit = 64, bool means = false)
      : step_(cache, parts, true) {
    const Heads& heads = cache.heads();
    bounds_.unit = means ? 16 : unit;
    bounds_.vectors = means ? 1 : 2;
    const size_t pages = cache.key_scales().size() / static_cast<size_t>(64 * heads.kv_heads);
    const auto numbers = static_cast<size_t>(heads.kv_heads * bounds_.page_numbers(heads.dims));
    values_ = DeviceArray<uint16_t>(std::vector<uint16_t>(pages * numbers, kUnmade));
    known_ = DeviceArray<int32_t>(std::vector<int32_t>(pages * stride()));
    bounds_.values = values_.data();
    bounds_.known = known_.data();
    bounds_.known_stride = static_cast<int64_t>(stride());
  }

  IndexStep& step() { return step_; }
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
    p.kv.bounds = bounds_;
    return step_.on_gpu(p, {{-1, 0, 0, 0}}, [&] {
      ++p.visits.num_rows;
      run_on_gpu(p);
    });
  }

 private:
  IndexStep step_;
  ops::PageBounds bounds_;
  DeviceArray<uint16_t> values_;
  DeviceArray<int32_t> known_;
};

// Drafts over the end of a page, a tree, a short sequence; the first one's prefix again.
const std::vector<Part> kParts = {
    {0, 1000, 1}, {1, 642, 5}, {1, 700, 4, {1, 3, 5, 11}}, {2, 130, 2}, {0, 800, 1}};

Cache cache_of(const Heads& heads, int turn) {
  Cache cache(heads, static_cast<uint32_t>(turn + 7));
  cache.add(1000);
  cache.add(700);
  cache.add(130);
  cache.upload();
  return cache;
}

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
      const Cache cache = cache_of({kv, dims, 2, group, DType::f32}, turn);
      Rows rows(cache, kParts);
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

// The lists of units may differ in some of them where their means round.
void expect_lists(const std::vector<uint64_t>& got, const std::vector<uint64_t>& expected,
                  bool exactly) {
  if (exactly) CHECK(got == expected);
  int64_t off = 0;
  int64_t all = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    off += std::popcount(got[i] ^ expected[i]);
    all += std::popcount(expected[i]);
  }
  CHECK(off * 100 <= all);
}

TEST("units within pages and means are the CPU's, also of a window, and votes") {
  struct Units {
    int32_t unit;
    bool means;
  };
  int turn = 0;
  for (const Units& units : {Units{16, false}, {32, false}, {16, true}, {64, true}}) {
    for (const DType kv : {DType::bf16, DType::f16, DType::i8, DType::f32}) {
      const int32_t group = 1 + turn % 4;
      const Cache cache = cache_of({kv, turn % 3 == 0 ? 128 : 32, 2, group, DType::f32}, turn);
      Rows rows(cache, kParts, units.unit, units.means);
      rows.step().set_scored(turn % 2 == 0 ? 3 : 64);
      PageIndexProblem p;
      p.unit = units.unit;
      p.means = units.means;
      p.vote = turn % 2 == 0 ? ops::HeadVote::sum : ops::HeadVote::highest;
      p.window_left = turn % 3 == 1 ? 450 : -1;
      p.sink_tokens = turn % 4 == 1 ? 64 : 5;
      p.local_tokens = turn % 5 == 1 ? 150 : 0;
      p.keys = turn % 4 == 3 ? 0 : 128;
      p.share = turn % 4 == 3 ? 0.3f : 0.0f;
      expect_lists(rows.on_gpu(p), rows.on_cpu(p), !units.means);
      ++turn;
    }
  }
}

TEST("means are those of 16 keys, rounded") {
  for (const DType kv : {DType::bf16, DType::i8, DType::f32}) {
    const Cache cache = cache_of({kv, 32, 2, 1, DType::f32}, 3);
    Rows rows(cache, {{0, 1000, 1}}, 16, true);
    PageIndexProblem p;
    p.unit = 16;
    p.means = true;
    p.keys = 64;
    rows.on_gpu(p);
    const std::vector<uint16_t> means = rows.bounds();
    const Sequence& s = cache.sequence(0);
    for (int64_t unit = 0; unit < 14 * 4; ++unit) {
      for (int64_t at = 0; at < 2 * 32; ++at) {
        const int64_t head = at / 32;
        double sum = 0.0;
        double size = 0.0;
        for (int64_t t = 16 * unit; t < 16 * (unit + 1); ++t) {
          const double x = double{s.k[index_of(t, head, at % 32, 2, 32)]} *
                           double{s.k_scale[static_cast<size_t>(2 * t + head)]};
          sum += x;
          size += std::abs(x);
        }
        const int64_t place = s.pages[static_cast<size_t>(unit / 4)] * 2 + head;
        const float mean =
            bf16_to_f32(means[static_cast<size_t>((place * 4 + unit % 4) * 32 + at % 32)]);
        // Half a unit in the last place of bf16, and what 16 sums of float32 round.
        CHECK(std::abs(double{mean} - sum / 16.0) <=
              std::abs(sum / 16.0) * 0x1p-8 + size * 0x1p-23);
      }
    }
  }
}

TEST("single keys are the CPU's, by all channels and by some") {
  int turn = 0;
  for (const DType kv : {DType::bf16, DType::f16, DType::i8, DType::f32}) {
    for (const bool all : {true, false}) {
      const int32_t group = turn % 3 == 0 ? 5 : 1 + turn % 3;
      const int32_t dims = all ? 16 : 64;
      const Cache cache = cache_of({kv, dims, 2, group, DType::f32}, turn);
      Rows rows(cache, kParts);
      rows.step().set_scored(turn % 2 == 0 ? 3 : 64);
      PageIndexProblem p;
      p.unit = 1;
      p.vote = turn % 2 == 0 ? ops::HeadVote::sum : ops::HeadVote::highest;
      p.sink_tokens = 5;
      p.keys = turn % 4 == 3 ? 0 : 100;
      p.share = turn % 4 == 3 ? 0.3f : 0.0f;
      p.window_left = turn % 4 == 2 ? 450 : -1;
      const std::vector<int32_t> channels = {0, 1, 7, 40, 42, 43, 63, 5, 6, 30, 31, 33, 50, 52};
      const DeviceArray<int32_t> there(channels);
      PageIndexProblem on_gpu = p;
      if (!all) {
        p.num_channels = on_gpu.num_channels = 7;
        p.channels = channels.data();
        on_gpu.channels = there.data();
      }
      CHECK(rows.on_gpu(on_gpu) == rows.on_cpu(p));
      ++turn;
    }
  }
}

TEST("long sequences are searched in several passes, and equal keys go to the first") {
  Cache cache({DType::bf16, 16, 1, 2, DType::f32}, 8);
  cache.add(9000);
  cache.add_constant(6000);
  cache.upload();
  Rows rows(cache, {{0, 9000, 1}, {1, 6000, 1}});
  PageIndexProblem p;
  p.unit = 1;
  p.keys = 1000;
  const std::vector<uint64_t> words = rows.on_gpu(p);
  CHECK(words == rows.on_cpu(p));
  const size_t list = words.size() / 2;
  for (size_t i = 0; i < 16; ++i) {
    CHECK_EQ(words[list + i], i < 15 ? ~uint64_t{0} : (uint64_t{1} << 40) - 1);
  }
}

// The CPU bounds a NaN by zeros.
TEST("nothing is chosen by queries that are no numbers") {
  const Cache cache = cache_of({DType::bf16, 32, 2, 1, DType::f32}, 8);
  Rows rows(cache, {{0, 1000, 1}});
  for (int32_t i = 0; i < 64; ++i) rows.step().set_query(static_cast<size_t>(i), NAN);
  for (const int32_t unit : {1, 64}) {
    PageIndexProblem p;
    p.unit = unit;
    p.keys = 128;
    PageIndexProblem nothing = p;
    nothing.keys = 0;
    CHECK(rows.on_gpu(p) == rows.on_cpu(nothing));
  }
}

// Of both heads of a sequence, as the host has it.
std::vector<float> plane_of_sequence() {
  return std::vector<float>(2 * 1024);
}

TEST("rows visit what those before have chosen while their queries are alike") {
  const Cache cache = cache_of({DType::bf16, 32, 2, 2, DType::f32}, 4);
  // Rows of a page, the second and the third as the first; others on the page behind, in two turns.
  const std::vector<Part> steps = {{0, 805, 4}, {0, 806, 1}, {0, 835, 3}, {0, 900, 1}};
  std::vector<float> on_host = plane_of_sequence();
  const DeviceArray<float> there(on_host);
  const std::vector<ScoredRows> scored = {{"kept", {on_host.data(), 1024, 2, 1000}, 0, 1}};
  const DeviceArray<ops::MassRows> rows_there(
      std::vector<ops::MassRows>{{there.data(), 1024, nullptr, 0, 0, 1}});
  for (const Part& part : steps) {
    Rows rows(cache, {part});
    rows.step().set_scored(2);
    const Sequence& s = cache.sequence(0);
    for (size_t i = 0; i < 128 && part.rows == 4; ++i) {
      const float first = s.q[801 * 128 + i];
      rows.step().set_query(128 + i, 1.5f * first);
      rows.step().set_query(256 + i, first + (i == 3 ? 0.1f : 0.0f));
    }
    PageIndexProblem p;
    p.unit = 1;
    p.keys = 64;
    p.reuse = 0.9f;
    p.planes = {"kept", scored.data(), 1};
    PageIndexProblem on_gpu = p;
    on_gpu.planes.rows = rows_there.data();
    on_gpu.planes.num_rows = 1;
    CHECK(rows.on_gpu(on_gpu) == rows.on_cpu(p));
    CHECK(there.values() == on_host);
  }
  CHECK_EQ(on_host[5], 2.0f);  // that visited what another one had chosen
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
  PageIndexProblem pages;
  pages.keys = 192;
  PageIndexProblem keys = pages;
  keys.unit = 1;
  keys.reuse = 0.9f;
  keys.planes.name = "kept";
  const std::vector<uint64_t> expected = rows.on_gpu(pages);
  std::vector<uint64_t> expected_keys;
  const auto run_keys = [&] {
    const DeviceArray<float> plane(std::vector<float>(1024));
    const DeviceArray<ops::MassRows> there(
        std::vector<ops::MassRows>{{plane.data(), 1024, nullptr, 0, 0, 1}});
    keys.planes.rows = there.data();
    keys.planes.num_rows = 1;
    return rows.on_gpu(keys);
  };
  expected_keys = run_keys();
  const DeviceArray<int32_t> some(std::vector<int32_t>{1, 2, 9, 30});
  PageIndexProblem channels = pages;
  channels.unit = 1;
  channels.channels = some.data();
  channels.num_channels = 4;
  const std::vector<uint64_t> expected_channels = rows.on_gpu(channels);
  expect_every_barrier_matters(
      [&] {
        return rows.on_gpu(pages) == expected && run_keys() == expected_keys &&
               rows.on_gpu(channels) == expected_channels;
      },
      3);
}

TEST("what the kernel cannot do is refused") {
  PageIndexProblem p;
  p.kv.dtype = DType::bf16;
  p.kv.head_dim = 64;
  p.kv.num_kv_heads = 1;
  p.num_qo_heads = 129;
  CHECK_THROWS(Unsupported, "these x head_dim above 8192", run_on_gpu(p));
  p.num_qo_heads = 1;
  p.kv.head_dim = 24;
  CHECK_THROWS(Unsupported, "not a multiple of 16", run_on_gpu(p));
  p.kv.head_dim = 272;
  CHECK_THROWS(Unsupported, "head_dim is above 256", run_on_gpu(p));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
