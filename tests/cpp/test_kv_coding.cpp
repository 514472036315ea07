// Encoded pages in the cache: who shares them, what they cost, what is refused.
#include <numeric>
#include <vector>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/kv_cache.h"
#include "effinfer/threads.h"
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
    CHECK_EQ(model.cache.free_pages(), 8);
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
  CHECK_EQ(model.cache.free_pages(), 16 - 7 - 5);
  model.cache.encode(second, pool);
  model.check();
  CHECK_EQ(model.cache.free_pages(), 16 - 7);
  CHECK(std::ranges::equal(model.cache.pages(first), model.cache.pages(second)));
  // What is written to again is another page's then.
  model.release(first, false);
  model.feed(second, text(400, 100));
  model.cache.encode(second, pool);
  model.check();
}

TEST("a page whose numbers changed is encoded again") {
  ThreadPool pool(1);
  KvModel model(config_of(16, 4, 0));
  const SequenceId first = model.create(text(0, 128));
  model.feed(first, text(0, 128));
  const SequenceId second = model.fork(first);
  model.cache.encode(first, pool);
  model.merge(second, {{0, 3, {3, 70}, {0.5f, 0.5f}}});
  model.cache.encode(second, pool);
  model.check();
  CHECK(model.cache.pages(first)[0] != model.cache.pages(second)[0]);
  CHECK_EQ(model.cache.pages(first)[1], model.cache.pages(second)[1]);
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

TEST("encoding waits for a page where others need theirs, and cached prefixes give way") {
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
  CHECK_EQ(model.cache.cached_prefix_pages(), 0);
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
  config = config_of(4);
  config.layer_devices.assign(2, {});
  CHECK_THROWS(Unsupported, "coding: not on a GPU", KvCache{config});
}

CHECK_MAIN()
