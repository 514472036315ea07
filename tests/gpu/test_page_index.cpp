// The pages that generated rows visit, chosen on the GPU: the CPU's lists, and bounds of keys that
// are made once and exactly.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/float16.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "effinfer/threads.h"
#include "gpu/attention_batch.h"
#include "gpu/mutations.h"
#include "ops/page_index.h"

namespace effinfer {
namespace {

using ops::IndexedHead;
using ops::PageIndexProblem;

constexpr uint64_t kUntouched = 0x5a5a5a5a5a5a5a5a;
constexpr uint16_t kUnmade = 0x5a5a;

ThreadPool& pool() {
  static ThreadPool threads(2);
  return threads;
}

// A step of generated rows over sequences of a cache, on the host and on the device, where bounds
// are kept from one run to the next.
class Rows {
 public:
  Rows(const Cache& cache, const std::vector<Part>& parts) : cache_(cache) {
    const Heads& heads = cache.heads();
    qo_indptr_ = kv_indptr_ = {0};
    for (const Part& part : parts) {
      const Sequence& s = cache.sequence(part.sequence);
      const int64_t width = int64_t{heads.qo_heads()} * heads.dims;
      q_.insert(q_.end(), s.q.begin() + (part.length - part.rows) * width,
                s.q.begin() + part.length * width);
      qo_indptr_.push_back(qo_indptr_.back() + part.rows);
      kv_len_.push_back(part.length);
      kv_indices_.insert(kv_indices_.end(), s.pages.begin(),
                         s.pages.begin() + (part.length + 63) / 64);
      kv_indptr_.push_back(static_cast<int32_t>(kv_indices_.size()));
      for (int32_t i = 0; i < part.rows; ++i) {
        paths_.push_back(part.paths.empty() ? 0 : part.paths[static_cast<size_t>(i)]);
      }
      most_ = std::max(most_, part.length);
    }
    layout_.num_tokens = qo_indptr_.back();
    layout_.num_sequences = static_cast<int64_t>(parts.size());
    layout_.qo_indptr = qo_indptr_.data();
    layout_.kv_indptr = kv_indptr_.data();
    layout_.kv_indices = kv_indices_.data();
    layout_.kv_len = kv_len_.data();
    layout_.ancestors = paths_.data();
    ops::VisitShape shape = {heads.qo_heads(), heads.kv_heads};
    shape.blocks = false;
    shape.rows = true;
    buffers_ = ops::VisitBuffers(shape, layout_.num_tokens + 1, layout_.num_sequences, most_);
    plan_ = buffers_.plan(layout_);
    indexed_.assign(static_cast<size_t>(heads.kv_heads), IndexedHead::chosen);
    const size_t pages = cache.key_scales().size() / static_cast<size_t>(64 * heads.kv_heads);
    const size_t bounds = pages * static_cast<size_t>(heads.kv_heads * 2 * heads.dims);
    values_ = DeviceArray<uint16_t>(std::vector<uint16_t>(bounds, kUnmade));
    known_ = DeviceArray<int32_t>(std::vector<int32_t>(pages * stride()));
  }

  std::vector<IndexedHead>& indexed() { return indexed_; }
  std::vector<int32_t> known() const { return known_.values(); }
  std::vector<uint16_t> bounds() const { return values_.values(); }
  // In another layer's place.
  size_t stride() const { return static_cast<size_t>(3 * cache_.heads().kv_heads); }

  // Words [list][word].
  std::vector<uint64_t> on_cpu(PageIndexProblem p) {
    const std::vector<uint8_t> k = cache_.key_bytes();
    const std::vector<float> scales = cache_.key_scales();
    set(p);
    p.kv.k = const_cast<uint8_t*>(k.data());
    p.kv.k_scale = const_cast<float*>(scales.data());
    p.q = q_.data();
    p.batch = layout_;
    p.visits = plan_;
    p.heads = indexed_.data();
    std::fill_n(plan_.words, num_words(), kUntouched);
    ops::run_alone(p, pool());
    return {plan_.words, plan_.words + num_words()};
  }

  // With a row that is of no sequence behind the others.
  std::vector<uint64_t> on_gpu(PageIndexProblem p) {
    const DeviceArray<float> q(q_);
    const DeviceArray<int32_t> qo(qo_indptr_), kv(kv_indptr_), pages(kv_indices_), len(kv_len_);
    const DeviceArray<uint64_t> paths(paths_);
    const DeviceArray<IndexedHead> indexed(indexed_);
    std::vector<ops::VisitBlock> rows(plan_.blocks, plan_.blocks + plan_.num_rows);
    rows.push_back({-1, 0, 0, 0});
    const DeviceArray<ops::VisitBlock> blocks(rows);
    const DeviceArray<uint64_t> words(std::vector<uint64_t>(num_words(), kUntouched));
    set(p);
    p.kv.bounds.values = values_.data();
    p.kv.bounds.known = known_.data();
    p.kv.bounds.known_stride = static_cast<int64_t>(stride());
    p.q = q.data();
    p.batch = layout_;
    p.batch.qo_indptr = qo.data();
    p.batch.kv_indptr = kv.data();
    p.batch.kv_indices = pages.data();
    p.batch.kv_len = len.data();
    p.batch.ancestors = paths.data();
    p.visits = plan_;
    p.visits.num_rows = static_cast<int64_t>(rows.size());
    p.visits.blocks = blocks.data();
    p.visits.words = words.data();
    p.heads = indexed.data();
    run_on_gpu(p);
    return words.values();
  }

 private:
  size_t num_words() const {
    return static_cast<size_t>(plan_.num_rows * plan_.num_kv_heads * plan_.list_words);
  }
  void set(PageIndexProblem& p) const {
    const Heads& heads = cache_.heads();
    p.num_qo_heads = heads.qo_heads();
    p.q_stride = int64_t{heads.qo_heads()} * heads.dims;
    p.kv = cache_.layer();
    p.sm_scale = 1.0f / std::sqrt(static_cast<float>(heads.dims));
    p.max_kv_len = most_;
  }

  const Cache& cache_;
  std::vector<float> q_;
  std::vector<int32_t> qo_indptr_, kv_indptr_, kv_indices_, kv_len_;
  std::vector<uint64_t> paths_;
  int32_t most_ = 0;
  ops::BatchLayout layout_;
  ops::VisitBuffers buffers_;
  ops::VisitPlan plan_;
  std::vector<IndexedHead> indexed_;
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
      p.pages = turn % 3;
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
  p.pages = 2;
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
  p.pages = 3;
  const std::vector<uint64_t> words = rows.on_gpu(p);
  for (size_t i = 0; i < 10; ++i) CHECK_EQ(words[i], i < 3 || i >= 8 ? ~uint64_t{0} : uint64_t{0});
  p.pages = 0;
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
  p.pages = 1;
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
  p.pages = 3;
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
