// Encoded pages in the cache: who shares them, what they cost, what is refused.
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <utility>
#include <vector>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/kv_cache.h"
#include "effinfer/threads.h"
#include "kv/page_pool.h"
#include "kv_model.h"

using namespace effinfer;

namespace {

KvCacheConfig config_of(int32_t num_pages, int32_t bits = 4, int32_t residual = 64) {
  return {.num_layers = 2,
          .num_kv_heads = 2,
          .head_dim = 64,
          .dtype = DType::bf16,
          .num_pages = num_pages,
          .rope = {{}, {}},
          .coding = {bits, residual}};
}

std::vector<int32_t> text(int32_t first, int64_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Two sequences of two full pages, which they share, but that the first one has them encoded.
struct Shared {
  ThreadPool pool{1};
  KvModel model{config_of(16, 4, 0)};
  SequenceId first = model.create(text(0, 128));
  SequenceId second;

  Shared() {
    model.feed(first, text(0, 128));
    second = model.fork(first);
    model.cache.encode(first, pool);
  }
  // Whether the second one's page is encoded as the first one's.
  bool is_same(size_t page) {
    model.cache.encode(second, pool);
    model.check();
    return model.cache.pages(first)[page] == model.cache.pages(second)[page];
  }
};

constexpr size_t kPlainPage = size_t{2} * 2 * 2 * 64 * 64 * 2;  // layers, heads, K and V, bf16

}  // namespace

TEST("pages behind the newest tokens take 28 or 17 % of their bytes") {
  ThreadPool pool(2);
  for (const int32_t bits : {4, 2}) {
    KvModel model(config_of(16, bits));
    const SequenceId id = model.create(text(0, 500));
    model.feed(id, text(0, 500));
    CHECK_EQ(model.cache.used_bytes(id), 8 * kPlainPage);
    model.cache.encode(id, pool);
    model.check();
    CHECK_EQ(model.cache.encoded_pages(id), 6);  // (500 - 64) / 64
    const size_t coded = kPlainPage * (bits == 4 ? 72 : 44) / 256;
    CHECK_EQ(model.cache.used_bytes(id), 2 * kPlainPage + 6 * coded);
    CHECK_EQ(model.cache.used_bytes(), model.cache.used_bytes(id));
    CHECK_EQ(model.cache.free_pages(), 12);  // 16 - 2 - 6 times 28 or 17 %
    CHECK_EQ(model.cache.slots_before_encoding(id), 64 + 7 * 64 - 500);
  }
}

TEST("whoever shares a page shares what is made of it") {
  ThreadPool pool(1);
  KvModel model(config_of(16));
  const SequenceId first = model.create(text(0, 400));
  model.feed(first, text(0, 400));
  const SequenceId second = model.fork(first);
  model.cache.encode(first, pool);
  CHECK_EQ(model.cache.free_pages(), 16 - 7 - 2);  // 1.4 for five encoded ones
  model.cache.encode(second, pool);
  model.check();
  CHECK_EQ(model.cache.free_pages(), 16 - 2 - 2);
  CHECK(std::ranges::equal(model.cache.pages(first), model.cache.pages(second)));
  // What is written to again is another page's then.
  model.release(first, false);
  model.feed(second, text(400, 100));
  model.cache.encode(second, pool);
  model.check();
}

TEST("a page whose numbers changed is encoded again") {
  Shared shared;
  shared.model.merge(shared.second, {{0, 3, {3, 70}, {0.5f, 0.5f}}});
  CHECK(!shared.is_same(0));
  CHECK(shared.is_same(1));
}

TEST("a page that is filled anew after a rollback is encoded again") {
  Shared shared;
  shared.model.rollback(shared.second, 10);
  shared.model.feed(shared.second, text(700, 10));
  CHECK(shared.is_same(0));
  CHECK(!shared.is_same(1));
}

TEST("prefixes are cached as they were written, up to where pages are due") {
  ThreadPool pool(1);
  KvModel model(config_of(16));
  const SequenceId first = model.create(text(0, 400));
  model.feed(first, text(0, 400));
  model.cache.publish(first);
  CHECK_EQ(model.cache.cached_prefix_pages(), 5);
  model.cache.encode(first, pool);
  model.cache.publish(first);  // encoded pages are no prefix
  CHECK_EQ(model.cache.cached_prefix_pages(), 5);
  const SequenceId second = model.create(text(0, 300));
  CHECK_EQ(model.cache.length(second), 3 * 64);
  model.feed(second, text(192, 108));
  model.check();
  model.cache.encode(second, pool);
  model.check();
  CHECK_EQ(model.cache.pages(first)[0], model.cache.pages(second)[0]);
  model.release(first, true);
  model.release(second, true);
  CHECK_EQ(model.cache.available_pages(), 16);
}

TEST("encoding waits for memory where others need theirs, and cached prefixes give way") {
  ThreadPool pool(1);
  KvModel model(config_of(7));
  const SequenceId id = model.create(text(0, 400));
  model.feed(id, text(0, 400));
  model.cache.publish(id);
  CHECK(model.cache.can_encode(id));
  const SequenceId other = model.fork(id);
  CHECK(!model.cache.can_encode(id));
  CHECK_THROWS(OutOfMemory, "encode", model.cache.encode(id, pool));
  model.check();
  model.release(other, false);
  model.cache.encode(id, pool);
  model.check();
  CHECK_EQ(model.cache.free_pages(), 0);
  CHECK_EQ(model.cache.cached_prefix_pages(), 3);  // and 2 pages, and 1.4 for five encoded ones
}

TEST("more tokens fit where pages are encoded") {
  ThreadPool pool(1);
  for (const auto& [bits, expected] : {std::pair{4, 54}, std::pair{2, 88}}) {
    KvModel model(config_of(16, bits, 0));
    const SequenceId id = model.create(text(0, 64));
    model.feed(id, text(0, 64));
    model.cache.encode(id, pool);
    int64_t pages = 1;
    for (; model.cache.can_append(id, 64) && pages < 100; ++pages) {
      model.feed(id, text(static_cast<int32_t>(pages * 64), 64));
      model.cache.encode(id, pool);
    }
    model.check();
    // One page as it is written beside floor(15 / share) encoded ones.
    CHECK_EQ(pages, expected);
    CHECK(model.cache.used_bytes() <= 16 * kPlainPage);
  }
}

TEST("what encoding frees goes back to the system") {
  const auto resident = [] {
    std::ifstream file("/proc/self/statm");
    size_t size = 0, pages = 0;
    file >> size >> pages;
    return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  };
  ThreadPool threads(1);
  KvCacheConfig config = config_of(256);
  config.num_layers = config.num_kv_heads = 4;
  kv::PagePool pool(config);
  const size_t before = resident();
  std::vector<int32_t> pages(200);
  const std::vector<std::byte> numbers(pool.page_bytes(), std::byte{0x3c});
  for (int32_t& page : pages) pool.write_page(page = pool.allocate(), numbers.data());
  CHECK(resident() - before > 190 * pool.page_bytes());
  pool.encode(pages, threads, 0);
  // 28 % of them, a page that stays for the next tokens, and what else the process takes.
  CHECK(resident() - before <
        201 * pool.coded_page_bytes() + pool.page_bytes() + (size_t{16} << 20));
  // Pages that come back have values of 0, and so do those that stayed.
  std::vector<std::byte> found(pool.page_bytes());
  const size_t part = numbers.size() / 8;  // K, or V, of a layer
  for (int i = 0; i < 5; ++i) {
    pool.read_page(pool.allocate(), found.data());
    const auto v = std::span(found).subspan(part, part);
    CHECK(std::ranges::all_of(v, [](std::byte x) { return x == std::byte{0}; }));
  }
}

TEST("encoded pages are neither rolled back into nor changed") {
  ThreadPool pool(1);
  KvModel model(config_of(16));
  const SequenceId id = model.create(text(0, 400));
  model.feed(id, text(0, 400));
  model.cache.encode(id, pool);
  CHECK(model.cache.can_rollback(id, 400 - 5 * 64));
  CHECK(!model.cache.can_rollback(id, 400 - 5 * 64 + 1));
  CHECK_THROWS(InvalidArgument, "rollback: count: expected 0..80, got 81",
               model.cache.rollback(id, 81));
  const std::vector<std::vector<int32_t>> lists = {{0, 1}};
  CHECK_THROWS(Unsupported, "retain: not of", model.cache.retain(id, 0, lists));
  CHECK_THROWS(Unsupported, "evict: not of", model.cache.evict(id, 0, 0, 64));
  const std::vector<KvMerge> merges = {{0, 399, {398, 399}, {0.5f, 0.5f}}};
  CHECK_THROWS(Unsupported, "merge: not of", model.cache.merge(id, 0, merges));
  const std::vector<int64_t> from = {390};
  CHECK_THROWS(Unsupported, "reposition: not of", model.cache.reposition(id, from, 1));
  model.check();
  model.rollback(id, 80);
  model.feed(id, text(320, 10));
  model.check();
}

TEST("a sequence with encoded pages moves through a blob") {
  ThreadPool pool(1);
  KvModel model(config_of(16, 2));
  SequenceId id = model.create(text(0, 400));
  model.feed(id, text(0, 400));
  model.cache.encode(id, pool);
  const std::vector<std::byte> blob = model.cache.export_(id);
  KvCache plain({2, 2, 64, DType::bf16, 16});
  CHECK_THROWS(InvalidArgument, "import", plain.import_(blob));
  model.move_through_blob(id, id);
  model.check();
  CHECK_EQ(model.cache.encoded_pages(id), 5);
  model.feed(id, text(400, 100));
  model.cache.encode(id, pool);
  model.check();
}

TEST("what no page can be made of is refused") {
  CHECK_THROWS(InvalidArgument, "coding.bits: expected 0, 2 or 4, got 3", KvCache(config_of(4, 3)));
  CHECK_THROWS(InvalidArgument, "coding.residual", KvCache(config_of(4, 4, -1)));
  KvCacheConfig config = config_of(4);
  config.dtype = DType::i8;
  CHECK_THROWS(Unsupported, "expected pages of bf16 or f32, got i8", KvCache{config});
}

CHECK_MAIN()
