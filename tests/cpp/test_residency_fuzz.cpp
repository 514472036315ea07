// Random sequences of everything that a KV cache can be asked for, against a plain model of it.
#include <numeric>
#include <random>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/threads.h"
#include "kv_model.h"

using namespace effinfer;

namespace {

class Fuzzer {
 public:
  Fuzzer(const KvCacheConfig& config, uint32_t seed) : model_(config, true), random_(seed) {}

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      try {
        act();
      } catch (const OutOfMemory&) {  // nothing has changed
        ++refused_;
        if (!model_.sequences.empty()) model_.release(any(), below(2) == 0);
      } catch (const Unsupported&) {  // nor here
        ++encoded_;
      }
      model_.check();
    }
    while (!model_.sequences.empty()) model_.release(any(), false);
    model_.cache.clear_prefixes();
    model_.check();
    CHECK_EQ(model_.cache.free_pages(), model_.cache.config().num_pages);
  }
  int refused() const { return refused_; }
  // Changes of sequences with encoded pages, which are refused.
  int encoded() const { return encoded_; }

 private:
  int64_t below(int64_t end) { return std::uniform_int_distribution<int64_t>(0, end - 1)(random_); }
  SequenceId any() {
    auto place = model_.sequences.begin();
    std::advance(place, below(static_cast<int64_t>(model_.sequences.size())));
    return place->first;
  }
  // Texts share their beginnings, so that prefixes are found.
  std::vector<int32_t> text(int64_t first, int64_t count) {
    const auto kind = static_cast<int32_t>(below(3));
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = first + i;
      tokens[static_cast<size_t>(i)] =
          static_cast<int32_t>(place) + (place < 320 ? 0 : 5000 * kind);
    }
    return tokens;
  }
  std::vector<int32_t> ascending(int64_t end, int64_t count) {
    std::vector<int32_t> all(static_cast<size_t>(end));
    std::iota(all.begin(), all.end(), 0);
    std::vector<int32_t> picked;
    std::ranges::sample(all, std::back_inserter(picked), count, random_);
    return picked;
  }

  // The slots behind some first ones change places.
  std::vector<std::vector<int32_t>> shuffled(int64_t slots, size_t lists) {
    std::vector<std::vector<int32_t>> made(lists, ascending(slots, slots));
    const int64_t first = below(slots);
    for (auto& list : made) std::shuffle(list.begin() + first, list.end(), random_);
    return made;
  }

  void act() {
    if (!model_.sequences.empty() && below(4) == 0) encode(any());
    if (model_.sequences.empty() || (model_.sequences.size() < 5 && below(6) == 0)) {
      const std::vector<int32_t> prompt = text(0, 1 + below(700));
      const SequenceId id = model_.create(prompt);
      const auto known = model_.cache.length(id);
      const auto more = std::min<int64_t>(static_cast<int64_t>(prompt.size()) - known, 200);
      model_.feed(id, {prompt.begin() + known, prompt.begin() + known + more});
      return;
    }
    const SequenceId id = any();
    switch (below(11)) {
      case 0:
        return model_.release(id, below(2) == 0);
      case 1:
        model_.fork(id);
        return;
      case 2:
        return rollback(id);
      case 3:
        return model_.cache.publish(id);
      case 4:
        return drafts(id);
      case 5:
        return residency(id);
      case 6: {
        SequenceId moved = 0;
        return model_.move_through_blob(id, moved);
      }
      default:
        return model_.feed(id, text(model_.cache.length(id), 1 + below(130)));
    }
  }

  void encode(SequenceId id) {
    KvCache& cache = model_.cache;
    if (!cache.can_encode(id)) {
      CHECK_THROWS(OutOfMemory, "encode", cache.encode(id, pool_));
      ++refused_;
      return;
    }
    const int64_t before = cache.encoded_pages(id);  // more than are due after a rollback
    cache.encode(id, pool_);
    model_.check();
    if (cache.config().coding.bits == 0) return CHECK_EQ(cache.encoded_pages(id), 0);
    const int64_t due =
        std::max<int64_t>(cache.slots(id) - cache.config().coding.residual, 0) / KvCache::kPageSize;
    CHECK_EQ(cache.encoded_pages(id), std::max(before, due));
    CHECK_EQ(cache.slots_before_encoding(id),
             cache.config().coding.residual + (due + 1) * KvCache::kPageSize - cache.slots(id));
  }

  void rollback(SequenceId id) {
    const int64_t count = below(std::min<int64_t>(model_.cache.length(id), 90) + 1);
    if (model_.cache.can_rollback(id, count)) return model_.rollback(id, count);
    CHECK_THROWS(InvalidArgument, "rollback", model_.cache.rollback(id, count));
  }

  void drafts(SequenceId id) {
    const int64_t count = 1 + below(40);
    model_.append(id, text(90'000 + model_.cache.length(id), count));
    model_.check();
    if (below(4) == 0) return model_.rollback(id, count);
    model_.keep(id, ascending(count, below(count + 1)));
  }

  void residency(SequenceId id) {
    const auto group = static_cast<int32_t>(below(model_.cache.num_whole_groups()));
    const int64_t slots = model_.cache.slots(id, group);
    if (slots < 2) return;
    const auto heads = model_.num_heads(static_cast<size_t>(group));
    switch (below(5)) {
      case 4:
        return model_.reorder(id, shuffled(slots, below(2) == 0 ? 1 : heads), group);
      case 0: {
        const int64_t count = 1 + below(slots);
        std::vector<std::vector<int32_t>> lists;
        for (size_t i = 0; i < (below(2) == 0 ? 1 : heads); ++i) {
          lists.push_back(ascending(slots, count));
        }
        if (lists.size() != 1) lists.resize(heads, lists[0]);
        return model_.retain(id, lists, group);
      }
      case 1: {
        int64_t count = below(slots);
        if (below(2) == 0) count -= count % KvCache::kPageSize;
        const int64_t begin = below(slots - count + 1);
        return model_.evict(id, begin, begin + count, group);
      }
      case 2: {
        const auto into = static_cast<int32_t>(below(slots));
        const int64_t count = 1 + below(std::min<int64_t>(slots, 4));
        return model_.merge(
            id,
            {{static_cast<int32_t>(below(static_cast<int64_t>(heads))), into,
              ascending(slots, count),
              std::vector<float>(static_cast<size_t>(count), 1.0f / static_cast<float>(count))}},
            group);
      }
      default: {
        std::vector<int64_t> from;
        for (size_t each = 0; each < model_.num_groups(); ++each) {
          from.push_back(below(model_.cache.slots(id, static_cast<int32_t>(each)) + 1));
        }
        return model_.reposition(
            id, from, below(200) - std::min<int64_t>(model_.cache.next_position(id), 100));
      }
    }
  }

  KvModel model_;
  ThreadPool pool_{1};
  std::mt19937 random_;
  int refused_ = 0;
  int encoded_ = 0;
};

KvCacheConfig config_of(DType dtype, bool windows) {
  KvCacheConfig config = {
      .num_layers = 3, .num_kv_heads = 1, .head_dim = 16, .dtype = dtype, .num_pages = 22};
  config.rope.assign(3, {{1.0f, 0.3f, 0.01f}, false});
  if (windows) config.groups = {{{0}, -1}, {{1}, 70}, {{2}, 7}};
  return config;
}

}  // namespace

TEST("random verbs on one group of layers") {
  int refused = 0;
  for (uint32_t seed = 0; seed < 12 / check::kShare; ++seed) {
    Fuzzer fuzzer(config_of(DType::f32, false), seed);
    fuzzer.run(150);
    refused += fuzzer.refused();
  }
  CHECK(refused > 0);
}

TEST("random verbs on pages that are encoded") {
  int refused = 0;
  int encoded = 0;
  for (uint32_t seed = 200; seed < 200 + 12 / check::kShare; ++seed) {
    KvCacheConfig config = config_of(DType::bf16, seed % 2 == 0);
    config.head_dim = 64;
    config.coding = {seed % 3 == 0 ? 2 : 4, static_cast<int32_t>(seed % 4 * 40)};
    Fuzzer fuzzer(config, seed);
    fuzzer.run(150);
    refused += fuzzer.refused();
    encoded += fuzzer.encoded();
  }
  CHECK(refused > 0);
  CHECK(encoded > 0);
}

TEST("random verbs on groups with windows") {
  int refused = 0;
  for (uint32_t seed = 100; seed < 100 + 15 / check::kShare; ++seed) {
    Fuzzer fuzzer(config_of(seed % 2 == 0 ? DType::bf16 : DType::f32, true), seed);
    fuzzer.run(150);
    refused += fuzzer.refused();
  }
  CHECK(refused > 0);
}

// Each keeps as many keys as it likes; a window beside them, or none.
TEST("random verbs on several groups without a window") {
  int refused = 0;
  for (uint32_t seed = 300; seed < 300 + 20 / check::kShare; ++seed) {
    KvCacheConfig config = config_of(seed % 2 == 0 ? DType::bf16 : DType::f32, false);
    config.groups = {{{0}, -1}, {{1}, -1}, {{2}, seed % 4 < 2 ? 70 : -1}};
    if (seed % 5 == 0) config.groups = {{{0, 1}, -1}, {{2}, -1}};
    Fuzzer fuzzer(config, seed);
    fuzzer.run(150);
    refused += fuzzer.refused();
  }
  CHECK(refused > 0);
}

CHECK_MAIN()
