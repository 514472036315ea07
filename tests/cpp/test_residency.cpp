// Which keys a sequence has (retain, evict, merge, reposition), groups of layers whose windows free
// their keys, and sequences as bytes: against a plain model of the cache.
#include <cstring>
#include <numeric>
#include <random>

#include "check.h"
#include "effinfer/error.h"
#include "kv/top_slots.h"
#include "kv_model.h"

using namespace effinfer;

namespace {

constexpr int32_t kPage = KvCache::kPageSize;
constexpr int32_t kWindow = 100;

KvRope rope(int32_t pairs, bool interleaved) {
  KvRope made;
  for (int32_t d = 0; d < pairs; ++d) {
    made.inv_freq.push_back(std::pow(0.1f, static_cast<float>(d) / static_cast<float>(pairs)));
  }
  made.interleaved = interleaved;
  return made;
}

// Layer 1 is not rotated.
KvCacheConfig config_of(int32_t num_pages, bool windows = false, DType dtype = DType::f32) {
  KvCacheConfig config = {
      .num_layers = 3, .num_kv_heads = 2, .head_dim = 16, .dtype = dtype, .num_pages = num_pages};
  config.rope = {rope(8, false), {}, rope(4, true)};
  if (windows) config.groups = {{{1}, -1}, {{0, 2}, kWindow}};
  return config;
}

std::vector<int32_t> range(int32_t count, int32_t first = 0) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), first);
  return values;
}

// `count` of 0..end - 1, ascending.
std::vector<int32_t> pick(std::mt19937& random, int64_t end, int64_t count) {
  std::vector<int32_t> all = range(static_cast<int32_t>(end));
  std::vector<int32_t> picked;
  std::ranges::sample(all, std::back_inserter(picked), count, random);
  return picked;
}

std::vector<std::vector<int32_t>> lists(std::mt19937& random, size_t heads, int64_t end,
                                        int64_t count) {
  std::vector<std::vector<int32_t>> made;
  for (size_t head = 0; head < heads; ++head) made.push_back(pick(random, end, count));
  return made;
}

}  // namespace

TEST("each head keeps tokens of its own in the same slots") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    std::mt19937 random(1);
    KvModel model(config_of(8, false, dtype));
    const SequenceId id = model.create({});
    model.feed(id, range(300));
    model.retain(id, lists(random, model.num_heads(0), 300, 70));
    model.check();
    CHECK_EQ(model.cache.slots(id), 70);
    CHECK_EQ(model.cache.length(id), 300);
    CHECK_EQ(model.cache.next_position(id), 300);
    CHECK_EQ(model.cache.pages(id).size(), 2u);
    CHECK_EQ(model.cache.free_pages(), 6);
    CHECK(!model.cache.is_prefix(id));
    model.feed(id, range(10, 1000));  // goes on at position 300 and slot 70
    model.check();
  }
}

TEST("each head has its slots in an order of its own") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    std::mt19937 random(4);
    KvModel model(config_of(12, false, dtype));
    const SequenceId id = model.create({});
    model.feed(id, range(300));
    const SequenceId other = model.fork(id);
    std::vector<std::vector<int32_t>> orders(model.num_heads(0), range(300));
    for (auto& order : orders) std::shuffle(order.begin() + 70, order.begin() + 250, random);
    model.reorder(id, orders);
    model.check();                          // of the other, too
    CHECK_EQ(model.cache.free_pages(), 4);  // the first page and the last stay shared
    CHECK(!model.cache.is_prefix(id));
    CHECK(model.cache.is_prefix(other));
    CHECK_EQ(model.cache.slots(id), 300);
    model.feed(id, range(10, 1000));
    model.reorder(other, {range(300)});  // nothing changes
    CHECK(model.cache.is_prefix(other));
    model.check();
  }
}

TEST("orders are of all slots, each once") {
  KvModel model(config_of(8));
  const SequenceId id = model.create({});
  model.feed(id, range(80));
  const auto refuse = [&](const char* what, std::vector<std::vector<int32_t>> orders) {
    CHECK_THROWS(InvalidArgument, what, model.cache.reorder(id, 0, orders));
  };
  std::vector<int32_t> twice = range(80);
  twice[3] = 4;
  std::vector<int32_t> outside = range(80);
  outside[79] = 80;
  refuse("[kv_cache] reorder: slots[0]: expected all 80 slots, got 79", {range(79)});
  refuse("slots[0]: expected each slot once, got 4 twice", {twice});
  refuse("slots[0][79]: expected 0..79, got 80", {outside});
  refuse("slots: expected 1 or 6 lists, got 2", {range(80), range(80)});
  model.check();
}

TEST("what others read stays as it was") {
  std::mt19937 random(2);
  KvModel model(config_of(16));
  const SequenceId a = model.create({});
  model.feed(a, range(200));
  model.cache.publish(a);
  const SequenceId b = model.fork(a);
  const SequenceId c = model.create(range(200));
  model.retain(b, {pick(random, 200, 150)});
  model.evict(c, 10, 74);
  model.reposition(c, {10}, -64);
  model.check();  // of all three
  const SequenceId d = model.create(range(200));
  CHECK_EQ(model.cache.length(d), 192);
  model.check();
  // Nothing of b or c is found again, published or not.
  model.release(b, true);
  model.cache.publish(c);
  model.release(c, true);
  CHECK_EQ(model.cache.cached_prefix_pages(), 3);
  model.check();
}

TEST("evicting whole pages' worth moves pages, and the fewer tokens") {
  for (const int64_t begin : {0, 4, 60, 64, 70, 127}) {
    for (const int64_t end : {64, 128, 192}) {
      KvModel model(config_of(8));
      const SequenceId id = model.create({});
      model.feed(id, range(300));
      const SequenceId other = model.fork(id);
      model.evict(id, begin, begin + end - (end > 64 ? 64 : 0));
      model.check();
      model.feed(id, range(5, 500));
      model.check();
      model.release(other, false);
    }
  }
}

TEST("merged slots hold the weighted sum") {
  KvModel model(config_of(8));
  const SequenceId id = model.create({});
  model.feed(id, range(130));
  const SequenceId other = model.fork(id);
  model.merge(id, {{0, 3, {3, 10, 100}, {0.5f, 0.25f, 0.25f}},
                   {5, 70, {1, 2}, {0.5f, 0.5f}},
                   {5, 71, {70}, {1.0f}}});
  model.check();
  model.release(other, false);
}

TEST("keys of i8 are merged and rotated within their rounding") {
  KvCacheConfig config = config_of(4, false, DType::i8);
  config.num_layers = 1;
  config.num_kv_heads = 1;
  config.rope.resize(1);
  KvCache cache(config);
  const SequenceId id = cache.create({});
  cache.append(id, range(2));
  cache.commit(id, 2);
  const ops::KvLayer kv = KvCacheAccess::layers(cache)[0];
  const int32_t page = cache.pages(id)[0];
  const auto key = [&](int64_t token, int64_t d) {
    return kv.k_head(page, 0) + ops::k_offset(token, d, 16, 4);
  };
  for (int64_t d = 0; d < 16; ++d) *key(0, d) = static_cast<uint8_t>(8 * d);
  kv.k_scale[page * kPage] = 0.5f;
  const std::vector<KvMerge> merges = {{0, 1, {0, 1}, {2.0f, 1.0f}}};
  cache.merge(id, 0, merges);  // the second token is zeros
  CHECK(std::abs(kv.k_scale[page * kPage + 1] - 120.0f / 127.0f) < 1e-6f);
  const int64_t from = 1;
  cache.reposition(id, {&from, 1}, 3);
  const float scale = kv.k_scale[page * kPage + 1];
  for (int64_t d = 0; d < 8; ++d) {
    const double angle = 3.0 * static_cast<double>(config.rope[0].inv_freq[static_cast<size_t>(d)]);
    const double x = 8.0 * static_cast<double>(d) * std::cos(angle) -
                     8.0 * static_cast<double>(d + 8) * std::sin(angle);
    const auto stored = static_cast<double>(static_cast<int8_t>(*key(1, d)));
    // Two roundings: half a step of each scale, and the first one turned.
    CHECK(std::abs(stored * static_cast<double>(scale) - x) <=
          0.5 * 120.0 / 127.0 * 1.5 + 0.5 * static_cast<double>(scale));
  }
}

TEST("rotating back and forth gives the keys again; positions go on") {
  KvModel model(config_of(8, true));
  const SequenceId id = model.create({});
  model.feed(id, range(400));
  model.reposition(id, {5, 0}, -100);
  CHECK_EQ(model.cache.next_position(id), 300);
  model.feed(id, range(30, 900));
  model.check();
  model.reposition(id, {0}, 70);
  model.check();
}

TEST("a window frees what it will not read") {
  KvModel model(config_of(40, true));
  const SequenceId id = model.create({});
  for (int32_t i = 0; i < 20; ++i) {
    model.feed(id, range(97, 100 * i));
    model.check();
    // The window, the slack and the page that they begin in.
    const auto pages = model.cache.pages(id, 1);
    const auto held = std::ranges::count_if(pages, [](int32_t page) { return page >= 0; });
    CHECK(held <= (kWindow + KvCache::kSlack) / kPage + 2);
    CHECK_EQ((model.cache.length(id) - model.cache.slots(id, 1)) % 256, 0);
  }
  CHECK_EQ(model.cache.pages(id, 0).size(), 31u);
  CHECK(model.cache.can_rollback(id, KvCache::kSlack));
  CHECK(!model.cache.can_rollback(id, 400));
  CHECK_THROWS(InvalidArgument, "[kv_cache] rollback: count", model.cache.rollback(id, 400));
  model.rollback(id, KvCache::kSlack);
  model.check();
  model.append(id, range(12, 7));
  model.keep(id, {0, 3, 11});
  model.check();
}

TEST("a prefix is found up to where the window behind it is cached") {
  KvModel model(config_of(64, true));
  const std::vector<int32_t> prompt = range(640);
  const SequenceId a = model.create(prompt);
  for (int32_t i = 0; i < 640; i += 64) {
    model.feed(a, {prompt.begin() + i, prompt.begin() + i + 64});
  }
  model.release(a, true);
  // Whoever goes on from the end finds all of it.
  std::vector<int32_t> longer = prompt;
  longer.push_back(7);
  const SequenceId b = model.create(longer);
  CHECK_EQ(model.cache.length(b), 640);
  model.check();
  model.release(b, false);
  // Whoever leaves it halfway finds nothing, and leaves the window there as it passes.
  std::vector<int32_t> other(prompt.begin(), prompt.begin() + 320);
  for (int32_t i = 0; i < 300; ++i) other.push_back(5000 + i);
  for (const int32_t expected : {0, 320}) {
    const SequenceId c = model.create(other);
    const auto cached = static_cast<int32_t>(model.cache.length(c));
    CHECK_EQ(cached, expected);
    for (int32_t i = cached; i < 620; i += 62) {
      model.feed(c, {other.begin() + i, other.begin() + std::min(i + 62, 620)});
    }
    model.check();
    model.release(c, false);
  }
  model.cache.clear_prefixes();
  model.check();
  CHECK_EQ(model.cache.free_pages(), 64);
}

TEST("15 of 18 layers with a window of 512: a quarter of the bytes behind 8,000 tokens") {
  KvCacheConfig config = {
      .num_layers = 18, .num_kv_heads = 1, .head_dim = 256, .dtype = DType::bf16, .num_pages = 130};
  config.groups = {{{5, 11, 17}, -1}, {{}, 511}};
  for (int32_t layer = 0; layer < 18; ++layer) {
    if (layer % 6 != 5) config.groups[1].layers.push_back(layer);
  }
  KvCache cache(config);
  config.groups.clear();
  KvCache whole(config);
  for (KvCache* each : {&cache, &whole}) {
    const SequenceId id = each->create({});
    for (int32_t i = 0; i < 8000; i += 500) {
      each->append(id, range(500, i));
      each->commit(id, 500);
    }
    CHECK_EQ(each->used_bytes(), each->used_bytes(id));
  }
  CHECK(4 * cache.used_bytes() <= whole.used_bytes());
  CHECK_EQ(cache.num_bytes(), whole.num_bytes());
}

TEST("a sequence comes back from its bytes") {
  for (const bool windows : {false, true}) {
    std::mt19937 random(3);
    KvModel model(config_of(30, windows, DType::bf16));
    const SequenceId id = model.create({});
    model.feed(id, range(500));
    model.retain(id, lists(random, model.num_heads(0), 500, 130));
    model.reposition(id, {0}, -200);
    const SequenceId noise = model.create({});
    SequenceId moved = 0;
    model.move_through_blob(id, moved);
    model.feed(noise, range(100, 3000));
    model.feed(moved, range(40, 70));
    model.check();
    std::vector<std::byte> blob = model.cache.export_(moved);
    const int32_t free = model.cache.free_pages();
    for (const size_t cut : {size_t{0}, size_t{20}, size_t{100}, blob.size() - 1}) {
      CHECK_THROWS(InvalidArgument, "[kv_cache] import",
                   model.cache.import_(std::span(blob).first(cut)));
    }
    KvCache other(config_of(30, !windows, DType::bf16));
    CHECK_THROWS(InvalidArgument, "[kv_cache] import", other.import_(blob));
    // No blob is trusted: every changed byte of its head is refused, or gives a sound sequence.
    for (size_t i = 0; i < 200; ++i) {
      std::vector<std::byte> damaged = blob;
      damaged[i] ^= std::byte{0x81};
      try {
        model.cache.release(model.cache.import_(damaged), true);
      } catch (const Error&) {
      }
      model.cache.check_integrity();
    }
    CHECK_EQ(model.cache.free_pages(), free);
    KvCache small(config_of(1, windows, DType::bf16));
    CHECK_THROWS(OutOfMemory, "[kv_cache] import", small.import_(blob));
    small.check_integrity();
  }
}

TEST("bad arguments change nothing") {
  KvModel model(config_of(8, true));
  KvCache& cache = model.cache;
  const SequenceId id = model.create({});
  model.feed(id, range(100));
  using Lists = std::vector<std::vector<int32_t>>;
  const auto retain = [&](const Lists& slots, int32_t group = 0) {
    cache.retain(id, group, slots);
  };
  CHECK_THROWS(InvalidArgument, "expected 1 or 2 lists, got 3", retain({{0}, {0}, {0}}));
  CHECK_THROWS(InvalidArgument, "at least one slot", retain({{}}));
  CHECK_THROWS(InvalidArgument, "slots[1]: expected 2 slots", retain({{0, 1}, {0}}));
  CHECK_THROWS(InvalidArgument, "slots[0][1]: expected 6..99, got 5", retain({{5, 5}}));
  CHECK_THROWS(InvalidArgument, "slots[1][0]: expected 0..99, got 100", retain({{5}, {100}}));
  CHECK_THROWS(InvalidArgument, "without a window", retain({{0}}, 1));
  CHECK_THROWS(InvalidArgument, "group", retain({{0}}, 2));
  CHECK_THROWS(InvalidArgument, "evict: slots", cache.evict(id, 0, 0, 100));
  CHECK_THROWS(InvalidArgument, "evict: slots", cache.evict(id, 0, 5, 4));
  CHECK_THROWS(InvalidArgument, "evict: slots", cache.evict(id, 0, -1, 4));
  const auto merge = [&](const KvMerge& one) { cache.merge(id, 0, {&one, 1}); };
  CHECK_THROWS(InvalidArgument, "merges[0].head", merge({2, 0, {0}, {1.0f}}));
  CHECK_THROWS(InvalidArgument, "merges[0].into", merge({0, 100, {0}, {1.0f}}));
  CHECK_THROWS(InvalidArgument, "merges[0].slots", merge({0, 0, {1, 1}, {1.0f, 1.0f}}));
  CHECK_THROWS(InvalidArgument, "merges[0].weights", merge({0, 0, {1}, {}}));
  CHECK_THROWS(InvalidArgument, "finite", merge({0, 0, {1}, {NAN}}));
  const auto move = [&](std::vector<int64_t> from, int64_t delta) {
    cache.reposition(id, from, delta);
  };
  CHECK_THROWS(InvalidArgument, "expected 1 or 2 slots", move({0, 0, 0}, 1));
  CHECK_THROWS(InvalidArgument, "delta", move({0}, -101));
  CHECK_THROWS(InvalidArgument, "in group 1", move({0, 101}, 1));
  CHECK(cache.is_prefix(id));
  model.append(id, range(3));
  CHECK_THROWS(InvalidArgument, "every token committed", retain({{0}}));
  CHECK_THROWS(InvalidArgument, "every token committed", cache.export_(id));
  model.commit(id);
  model.check();
  model.retain(id, {{0, 102}});
  CHECK_THROWS(InvalidArgument, "expected 0..0, got 1", cache.rollback(id, 1));
  model.check();
  KvCacheConfig plain = config_of(4);
  plain.rope.clear();
  KvCache unknown(plain);
  const SequenceId other = unknown.create({});
  const int64_t zero = 0;
  CHECK_THROWS(Unsupported, "how keys are rotated", unknown.reposition(other, {&zero, 1}, 1));
}

TEST("a prefix that nobody but the tree has takes no page for a copy") {
  KvModel model(config_of(4));
  const SequenceId id = model.create({});
  model.feed(id, range(250));
  model.cache.publish(id);
  model.evict(id, 2, 152);
  CHECK_EQ(model.cache.cached_prefix_pages(), 0);
  model.check();
}

TEST("without a page for a copy nothing changes") {
  KvModel model(config_of(4));
  const SequenceId a = model.create({});
  model.feed(a, range(256));
  const SequenceId b = model.fork(a);
  CHECK_THROWS(OutOfMemory, "[kv_cache] retain",
               model.cache.retain(b, 0, std::vector<std::vector<int32_t>>{{3, 5}}));
  const int64_t zero = 0;
  CHECK_THROWS(OutOfMemory, "[kv_cache] reposition", model.cache.reposition(b, {&zero, 1}, 1));
  model.check();
  model.retain(b, {range(70)});  // needs no copy
  model.check();
}

TEST("groups are checked") {
  const auto make = [](std::vector<KvGroup> groups) {
    KvCacheConfig config = config_of(4);
    config.groups = std::move(groups);
    KvCache cache(config);
  };
  CHECK_THROWS(InvalidArgument, "[kv_cache] groups", make({{{0, 1}, -1}}));
  CHECK_THROWS(InvalidArgument, "[kv_cache] groups", make({{{0, 1, 2}, 5}}));
  CHECK_THROWS(InvalidArgument, "[kv_cache] groups", make({{{0, 1}, -1}, {{1}, -1}}));
  CHECK_THROWS(InvalidArgument, "[kv_cache] groups", make({{{1, 2}, -1}, {{0}, -1}}));
  CHECK_THROWS(InvalidArgument, "[kv_cache] groups", make({{{0}, -1}, {{1}, 5}, {{2}, -1}}));
  CHECK_THROWS(InvalidArgument, "[kv_cache] groups", make({{{0, 1}, -1}, {{1, 2}, 5}}));
  CHECK_THROWS(InvalidArgument, "[kv_cache] groups", make({{{0, 1}, -1}, {{3}, 5}}));
  CHECK_THROWS(InvalidArgument, "[kv_cache] groups", make({{{0, 1, 2}, -1}, {{}, 5}}));
  make({{{0, 1, 2}, -1}});
  make({{{0, 2}, -1}, {{1}, 5}});
  make({{{0, 1}, -1}, {{2}, -1}});
  KvCacheConfig coded = config_of(4);
  coded.groups = {{{0, 1}, -1}, {{2}, -1}};
  coded.coding.bits = 4;
  CHECK_THROWS(Unsupported, "[kv_cache] groups: expected one without a window beside coding, got 2",
               KvCache refused(coded));
}

TEST("groups without a window keep as many tokens as each likes") {
  std::mt19937 random(6);
  KvCacheConfig config = config_of(12);
  config.groups = {{{0}, -1}, {{1, 2}, -1}};
  KvModel model(config, true);
  CHECK_EQ(model.cache.num_whole_groups(), 2);
  CHECK_EQ(model.cache.first_plane_head(1), 2);
  CHECK_EQ(model.cache.first_plane_head(2), 6);
  const SequenceId id = model.create({});
  model.feed(id, range(300));
  const size_t all = model.cache.used_bytes(id);
  model.retain(id, lists(random, 2, 300, 70), 0);
  model.retain(id, lists(random, 4, 300, 200), 1);
  model.check();
  CHECK_EQ(model.cache.slots(id, 0), 70);
  CHECK_EQ(model.cache.slots(id, 1), 200);
  CHECK_EQ(model.cache.most_slots(id), 200);
  // Of a third of the layers 2 of 5 pages stay, of the others 4: each frees its own.
  CHECK_EQ(model.cache.used_bytes(id) * 15, all * (2 + 4 + 4));
  CHECK_EQ(model.cache.free_pages(), 8);
  model.feed(id, range(10, 1000));  // goes on at position 300, and slots 70 and 200
  const SequenceId other = model.fork(id);
  model.feed(other, range(60, 2000));
  SequenceId moved = 0;
  model.move_through_blob(other, moved);
  model.check();
  CHECK_EQ(model.cache.slots(moved, 0), 140);
  CHECK_EQ(model.cache.slots(moved, 1), 270);
  CHECK(!model.cache.can_rollback(moved, 71));
  model.rollback(moved, 70);
  model.check();
  CHECK_THROWS(InvalidArgument, "[kv_cache] retain: group: expected one of 0..1",
               model.cache.retain(id, 2, std::vector<std::vector<int32_t>>{{0}}));
}

TEST("prefixes of groups without a window are whole") {
  KvCacheConfig config = config_of(12);
  config.groups = {{{0}, -1}, {{1}, -1}, {{2}, kWindow}};
  KvModel model(config);
  const SequenceId id = model.create({});
  model.feed(id, range(200));
  model.release(id, true);
  const SequenceId found = model.create(range(300));
  CHECK_EQ(model.cache.length(found), 192);
  model.check();
  model.retain(found, {{0, 5, 9}}, 1);  // others may still read what it was
  const SequenceId again = model.create(range(300));
  CHECK_EQ(model.cache.length(again), 192);
  model.check();
}

TEST("the highest scores are kept, beside what is protected") {
  const std::vector<float> scores = {9.0f, 1.0f, 5.0f, NAN,  5.0f, 0.0f,   // head 0
                                     0.0f, 0.0f, 0.0f, 7.0f, 0.0f, 0.0f};  // head 1
  using Lists = std::vector<std::vector<int32_t>>;
  CHECK(kv::top_slots(scores, 2, 6, 3, {0, 1}) == Lists({{0, 2, 5}, {0, 3, 5}}));
  CHECK(kv::top_slots(scores, 2, 6, 4, {2, 0}) == Lists({{0, 1, 2, 4}, {0, 1, 2, 3}}));
  CHECK(kv::top_slots(scores, 2, 6, 6, {0, 0}) == Lists({range(6), range(6)}));
  CHECK_THROWS(InvalidArgument, "count: expected 3", kv::top_slots(scores, 2, 6, 2, {2, 1}));
  CHECK_THROWS(InvalidArgument, "count: expected 1", kv::top_slots(scores, 2, 6, 0, {}));
  CHECK_THROWS(InvalidArgument, "to 6", kv::top_slots(scores, 2, 6, 7, {}));
  CHECK_THROWS(InvalidArgument, "scores", kv::top_slots(scores, 3, 6, 2, {}));
}

CHECK_MAIN()
