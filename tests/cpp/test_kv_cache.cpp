// The KV cache against a simple model: page tables, reference counts and contents.
#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/kv_cache.h"
#include "kv/kv_access.h"

using namespace effinfer;

namespace {

constexpr int32_t kPage = KvCache::kPageSize;

KvCacheConfig small(int32_t num_pages, DType dtype = DType::f32) {
  return {
      .num_layers = 2, .num_kv_heads = 2, .head_dim = 16, .dtype = dtype, .num_pages = num_pages};
}

std::vector<int32_t> range(int32_t count, int32_t first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) tokens[static_cast<size_t>(i)] = first + i;
  return tokens;
}

// What a step would write for `token` at a place: bytes that depend on everything.
uint8_t mark(int32_t token, int layer, int head, int plane) {
  return static_cast<uint8_t>((token * 31 + layer * 7 + head * 3 + plane) % 127);
}

// Visits the byte of each (layer, head, K or V) that stands for the token at `position`.
template <class Visit>
void visit_token(const KvCache& cache, SequenceId id, int64_t position, Visit&& visit) {
  const int32_t page = cache.pages(id)[static_cast<size_t>(position / kPage)];
  const int64_t token = position % kPage;
  int layer = 0;
  for (const ops::KvLayer& kv : KvCacheAccess::layers(cache)) {
    const int64_t size = dtype_info(kv.dtype).block_bytes;
    for (int head = 0; head < kv.num_kv_heads; ++head) {
      const int64_t k = ops::k_offset(token, 0, kv.head_dim, 4 / size);
      const int64_t v = ops::v_offset(token, 0, kv.head_dim, 4 / size);
      visit(kv.k_head(page, head)[k * size], layer, head, 0);
      visit(kv.v_head(page, head)[v * size], layer, head, 1);
      if (kv.k_scale == nullptr) continue;
      const int64_t scale = (static_cast<int64_t>(page) * kv.num_kv_heads + head) * kPage + token;
      visit(reinterpret_cast<uint8_t*>(kv.k_scale + scale)[0], layer, head, 2);
      visit(reinterpret_cast<uint8_t*>(kv.v_scale + scale)[0], layer, head, 3);
    }
    ++layer;
  }
}

// Plays a step: writes the K and V of what was appended.
void write(KvCache& cache, SequenceId id) {
  for (int64_t i = cache.committed(id); i < cache.length(id); ++i) {
    const int32_t token = cache.tokens(id)[static_cast<size_t>(i)];
    visit_token(cache, id, i, [&](uint8_t& byte, int layer, int head, int plane) {
      byte = mark(token, layer, head, plane);
    });
  }
}

void compute(KvCache& cache, SequenceId id) {
  write(cache, id);
  cache.commit(id, cache.length(id) - cache.committed(id));
}

void check_content(const KvCache& cache, SequenceId id) {
  int wrong = 0;
  for (int64_t i = 0; i < cache.committed(id); ++i) {
    const int32_t token = cache.tokens(id)[static_cast<size_t>(i)];
    visit_token(cache, id, i, [&](uint8_t& byte, int layer, int head, int plane) {
      wrong += byte != mark(token, layer, head, plane);
    });
  }
  CHECK_EQ(wrong, 0);
}

std::vector<int32_t> copy(std::span<const int32_t> values) {
  return {values.begin(), values.end()};
}

}  // namespace

TEST("pages follow the length, and rollback gives them back") {
  KvCache cache(small(4));
  CHECK_EQ(cache.free_pages(), 4);
  const SequenceId id = cache.create({});
  cache.append(id, range(65));
  CHECK_EQ(cache.pages(id).size(), 2u);
  CHECK_EQ(cache.free_pages(), 2);
  CHECK(cache.can_append(id, 4 * kPage - 65));
  CHECK(!cache.can_append(id, 4 * kPage - 64));
  CHECK_THROWS(OutOfMemory, "[kv_cache] append", cache.append(id, range(4 * kPage - 64)));
  CHECK_EQ(cache.length(id), 65);
  cache.rollback(id, 1);
  CHECK_EQ(cache.pages(id).size(), 1u);
  cache.rollback(id, 64);
  CHECK_EQ(cache.pages(id).size(), 0u);
  cache.check_integrity();
  cache.release(id);
  CHECK_EQ(cache.free_pages(), 4);
  CHECK_THROWS(InvalidArgument, "no sequence", cache.length(id));
}

TEST("a fork shares pages; the first to append copies the last one") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::i8}) {
    KvCache cache(small(6, dtype));
    const SequenceId a = cache.create({});
    cache.append(a, range(100));
    CHECK_THROWS(InvalidArgument, "committed", cache.fork(a));
    compute(cache, a);
    const SequenceId b = cache.fork(a);
    CHECK_EQ(cache.free_pages(), 4);
    cache.append(b, range(5, 500));
    cache.check_integrity();
    CHECK_EQ(cache.pages(a)[0], cache.pages(b)[0]);
    CHECK(cache.pages(a)[1] != cache.pages(b)[1]);
    compute(cache, b);
    cache.append(a, range(5, 900));  // sole owner again: no copy
    CHECK_EQ(cache.free_pages(), 3);
    compute(cache, a);
    check_content(cache, a);
    check_content(cache, b);
    // Back into the shared first page: the next append copies it.
    cache.rollback(b, 60);
    cache.append(b, range(1, 7));
    cache.check_integrity();
    CHECK(cache.pages(a)[0] != cache.pages(b)[0]);
    compute(cache, b);
    check_content(cache, a);
    check_content(cache, b);
  }
}

TEST("of a tree of drafts a path is kept, closed up across pages") {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i8}) {
    KvCache cache(small(4, dtype));
    const SequenceId id = cache.create({});
    cache.append(id, range(60));
    compute(cache, id);
    cache.append(id, range(100, 500));
    write(cache, id);
    std::vector<int32_t> expected = range(60);
    const std::vector<int32_t> rows = {0, 1, 3, 4, 5, 63, 67, 68, 99};
    for (const int32_t row : rows) expected.push_back(500 + row);
    cache.keep(id, rows);
    cache.check_integrity();
    CHECK(copy(cache.tokens(id)) == expected);
    CHECK_EQ(cache.committed(id), 69);
    CHECK_EQ(cache.free_pages(), 2);
    check_content(cache, id);
    cache.append(id, range(3, 900));
    cache.keep(id, {});
    CHECK(copy(cache.tokens(id)) == expected);
    check_content(cache, id);
  }
}

TEST("a page that others read is not written when a path is kept") {
  KvCache cache(small(6));
  const SequenceId a = cache.create({});
  cache.append(a, range(62));
  compute(cache, a);
  const SequenceId b = cache.fork(a);
  cache.append(b, range(9, 700));
  write(cache, b);
  cache.keep(b, std::vector<int32_t>{1, 4, 7});
  cache.check_integrity();
  check_content(cache, a);
  check_content(cache, b);
  CHECK_EQ(cache.length(b), 65);
}

TEST("wrong indices of what is to be kept change nothing") {
  KvCache cache(small(3));
  const SequenceId id = cache.create({});
  cache.append(id, range(10));
  compute(cache, id);
  cache.append(id, range(60, 200));
  write(cache, id);
  const std::vector<int32_t> before = copy(cache.tokens(id));
  for (const std::vector<int32_t>& rows :
       {std::vector<int32_t>{-1}, {60}, {0, 0}, {3, 2}, {1, 5, 5}, {0, 1, INT32_MAX}}) {
    CHECK_THROWS(InvalidArgument, "[kv_cache] keep: rows[", cache.keep(id, rows));
    CHECK(copy(cache.tokens(id)) == before);
    CHECK_EQ(cache.committed(id), 10);
  }
  CHECK_THROWS(InvalidArgument, "no sequence", cache.keep(id + 1, {}));
  cache.keep(id, range(60));
  CHECK(copy(cache.tokens(id)) == before);
  check_content(cache, id);
  CHECK_THROWS(InvalidArgument, "keep: rows[0]", cache.keep(id, std::vector<int32_t>{0}));
}

TEST("whole committed pages are reused, at least one token is left to compute") {
  KvCache cache(small(8));
  const SequenceId a = cache.create(range(130));
  cache.append(a, range(130));
  cache.commit(a, 127);  // the second page is not whole yet
  cache.publish(a);
  CHECK_EQ(cache.cached_prefix_pages(), 1);
  cache.commit(a, 3);
  cache.release(a);
  CHECK_EQ(cache.cached_prefix_pages(), 2);
  CHECK_EQ(cache.free_pages(), 6);
  CHECK_EQ(cache.available_pages(), 8);
  int32_t cached = -1;
  const SequenceId b = cache.create(range(128), &cached);
  CHECK_EQ(cached, 64);
  const SequenceId c = cache.create(range(129), &cached);
  CHECK_EQ(cached, 128);
  CHECK_EQ(cache.committed(c), 128);
  CHECK_EQ(cache.available_pages(), 6);
  std::vector<int32_t> other = range(129);
  other[63] = -1;
  const SequenceId d = cache.create(other, &cached);
  CHECK_EQ(cached, 0);
  cache.check_integrity();
  cache.release(b, false);
  cache.release(c, false);
  cache.release(d, false);
  cache.clear_prefixes();
  CHECK_EQ(cache.free_pages(), 8);
  cache.check_integrity();
}

TEST("prefixes are those of the same methods, in whole units, up to their most") {
  KvCache cache(small(40));
  const auto fill = [&](const std::vector<int32_t>& tokens, const PrefixKey& key) {
    int32_t cached = 0;
    const SequenceId id = cache.create(tokens, &cached, key);
    cache.append(id, std::span(tokens).subspan(static_cast<size_t>(cached)));
    compute(cache, id);
    check_content(cache, id);
    cache.release(id);
    cache.check_integrity();
    return cached;
  };
  const std::vector<int32_t> tokens = range(330);
  CHECK_EQ(fill(tokens, {}), 0);
  CHECK_EQ(fill(tokens, {7, 1, 200}), 0);     // keeps 192 tokens
  CHECK_EQ(fill(tokens, {7, 1, 1000}), 192);  // and now 320
  CHECK_EQ(fill(tokens, {7, 1, 140}), 128);
  CHECK_EQ(fill(tokens, {7, 1, 0}), 0);
  CHECK_EQ(fill(tokens, {8, 1, 1000}), 0);
  CHECK_EQ(fill(tokens, {}), 320);
  CHECK_EQ(cache.cached_prefix_pages(), 15);
  // What follows in a unit decides about its pages, too.
  CHECK_EQ(fill(tokens, {7, 128, 1000}), 0);
  CHECK_EQ(fill(tokens, {7, 128, 1000}), 256);
  std::vector<int32_t> other = tokens;
  other[250] = -1;
  CHECK_EQ(fill(other, {7, 128, 1000}), 128);
  CHECK_EQ(fill(other, {7, 1, 1000}), 192);
  CHECK_EQ(fill(tokens, {7, 128, 1000}), 256);
  CHECK_EQ(fill(tokens, {9, 96, 1000}), 0);
  CHECK_EQ(fill(tokens, {9, 96, 1000}), 192);  // units of 96 and of 64 tokens
  while (cache.free_pages() < 35) {
    const SequenceId id = cache.create({});
    const auto size = static_cast<size_t>(64 * (cache.free_pages() + 1));
    cache.append(id, std::vector<int32_t>(size, 1));
    cache.release(id, false);
    cache.check_integrity();
  }
  CHECK_THROWS(InvalidArgument, "key: expected a unit", cache.create(tokens, nullptr, {0, 0, 5}));
  CHECK_THROWS(InvalidArgument, "key: expected a unit", cache.create(tokens, nullptr, {0, 1, -1}));
}

TEST("the least recently used prefix goes first, one in use never does") {
  KvCache cache(small(4));
  for (int32_t first : {0, 1000, 2000}) {
    const SequenceId id = cache.create({});
    cache.append(id, range(64, first));
    cache.commit(id, 64);
    cache.release(id);
  }
  int32_t cached = 0;
  const SequenceId used = cache.create(range(65, 0), &cached);  // now the most recent
  CHECK_EQ(cached, 64);
  const SequenceId id = cache.create({});
  cache.append(id, range(2 * kPage, 5000));  // one free page, one evicted: 1000
  cache.check_integrity();
  CHECK_EQ(cache.cached_prefix_pages(), 2);
  cache.release(cache.create(range(65, 1000), &cached));
  CHECK_EQ(cached, 0);
  cache.release(cache.create(range(65, 2000), &cached));
  CHECK_EQ(cached, 64);
  CHECK(cache.can_append(id, 64));
  CHECK(!cache.can_append(id, 65));
  cache.append(id, range(kPage));
  CHECK_EQ(cache.cached_prefix_pages(), 1);
  CHECK_EQ(cache.length(used), 64);
  cache.check_integrity();
}

TEST("a recycled page reads as zeros in V") {
  KvCache cache(small(1, DType::i8));
  SequenceId id = cache.create({});
  cache.append(id, range(64, 1));
  compute(cache, id);
  cache.release(id, false);
  id = cache.create({});
  cache.append(id, range(1));
  const ops::KvLayer kv = KvCacheAccess::layers(cache)[1];
  const size_t bytes = kv.head_bytes() * 2;
  CHECK(std::all_of(kv.v_head(0, 0), kv.v_head(0, 0) + bytes, [](uint8_t b) { return b == 0; }));
  CHECK(std::all_of(kv.v_scale, kv.v_scale + 2 * kPage, [](float s) { return s == 0.0f; }));
}

TEST("bad configurations and counts are refused") {
  KvCacheConfig config = small(4);
  config.head_dim = 20;
  CHECK_THROWS(InvalidArgument, "[kv_cache] head_dim", KvCache{config});
  config = small(0);
  CHECK_THROWS(InvalidArgument, "num_pages", KvCache{config});
  config = small(4, DType::q4_0);
  CHECK_THROWS(InvalidArgument, "dtype", KvCache{config});
  config = small(INT32_MAX);
  config.num_layers = config.num_kv_heads = 1 << 30;
  CHECK_THROWS(OutOfMemory, "overflows", KvCache{config});
  config = small(INT32_MAX);
  CHECK_THROWS(OutOfMemory, "num_pages", KvCache{config});
  KvCache cache(small(2));
  const SequenceId id = cache.create({});
  CHECK_THROWS(InvalidArgument, "rollback", cache.rollback(id, 1));
  CHECK_THROWS(InvalidArgument, "commit", cache.commit(id, 1));
  CHECK_THROWS(InvalidArgument, "rollback", cache.rollback(id, -1));
}

// Keeps three of four of what is not committed, in the cache and in `tokens`.
void keep_some(KvCache& cache, SequenceId id, std::vector<int32_t>& tokens, std::mt19937& random) {
  const auto first = static_cast<size_t>(cache.committed(id));
  std::vector<int32_t> rows;
  std::vector<int32_t> kept(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(first));
  for (size_t i = first; i < tokens.size(); ++i) {
    if (random() % 4 == 0) continue;
    rows.push_back(static_cast<int32_t>(i - first));
    kept.push_back(tokens[i]);
  }
  cache.keep(id, rows);
  tokens = kept;
}

// Ten thousand random verbs against sequences kept as plain vectors.
TEST("random operations keep every invariant and every byte") {
  std::mt19937 random(7);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  KvCache cache(small(24, DType::i8));
  std::map<SequenceId, std::vector<int32_t>> model;
  int out_of_memory = 0;
  int reused = 0;
  for (int i = 0; i < 10000; ++i) {
    const int64_t verb = below(100);
    auto chosen = model.begin();
    if (!model.empty()) std::advance(chosen, below(static_cast<int64_t>(model.size())));
    if (model.empty() || verb < 10) {
      // Few distinct prompts, so that prefixes meet.
      const std::vector<int32_t> prompt =
          range(static_cast<int32_t>(below(300)), static_cast<int32_t>(below(3)) * 1000);
      int32_t cached = 0;
      const SequenceId id = cache.create(prompt, &cached);
      CHECK(cached == 0 || cached < static_cast<int32_t>(prompt.size()));
      reused += cached > 0;
      model[id] = {prompt.begin(), prompt.begin() + cached};
    } else if (verb < 55) {
      // Continues the prompt's run of ids, or diverges.
      std::vector<int32_t>& tokens = chosen->second;
      const int32_t next = tokens.empty() || below(10) == 0 ? static_cast<int32_t>(below(3)) * 1000
                                                            : tokens.back() + 1;
      const std::vector<int32_t> more = range(static_cast<int32_t>(below(100)), next);
      const bool fits = cache.can_append(chosen->first, static_cast<int64_t>(more.size()));
      try {
        cache.append(chosen->first, more);
        tokens.insert(tokens.end(), more.begin(), more.end());
        CHECK(fits);
      } catch (const OutOfMemory&) {
        CHECK(!fits);
        ++out_of_memory;
      }
    } else if (verb < 70) {
      compute(cache, chosen->first);
    } else if (verb < 75) {
      write(cache, chosen->first);
      keep_some(cache, chosen->first, chosen->second, random);
    } else if (verb < 82) {
      if (cache.committed(chosen->first) == cache.length(chosen->first)) {
        model[cache.fork(chosen->first)] = std::vector<int32_t>(chosen->second);
      }
    } else if (verb < 90) {
      const int64_t count = below(static_cast<int64_t>(chosen->second.size()) + 1);
      cache.rollback(chosen->first, count);
      chosen->second.resize(chosen->second.size() - static_cast<size_t>(count));
    } else if (verb < 92) {
      cache.publish(chosen->first);
    } else if (verb < 99 || i % 7 != 0) {
      cache.release(chosen->first, below(4) != 0);
      model.erase(chosen);
    } else {
      cache.clear_prefixes();
    }
    cache.check_integrity();
    CHECK(cache.available_pages() <= 24);
    if (i % 50 != 0) continue;
    for (const auto& [id, tokens] : model) {
      CHECK(copy(cache.tokens(id)) == tokens);
      check_content(cache, id);
    }
  }
  CHECK(out_of_memory > 50);
  CHECK(reused > 50);
  for (const auto& [id, tokens] : model) cache.release(id, false);
  cache.clear_prefixes();
  CHECK_EQ(cache.free_pages(), 24);
  cache.check_integrity();
}

CHECK_MAIN()
