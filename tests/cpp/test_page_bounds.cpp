// What a cache knows of pages' keys (ops::PageBounds), as a kernel would have written it after each
// of random operations: whoever changes a page's keys makes it unknown, or check_integrity() finds
// a key outside its bounds.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "core/float16.h"
#include "effinfer/error.h"
#include "effinfer/kv_cache.h"
#include "kv/kv_access.h"

namespace {

using namespace effinfer;

constexpr int64_t kPage = KvCache::kPageSize;
constexpr int32_t kDim = 16;

// window_left at least 0: of its second layer.
KvCacheConfig config(int32_t unit, bool means, int32_t window_left) {
  KvCacheConfig config = {
      .num_layers = 2, .num_kv_heads = 2, .head_dim = kDim, .dtype = DType::f32, .num_pages = 60};
  config.rope = {{{1.0f, 0.1f}}, {{0.5f}}};
  config.index_unit = unit;
  config.index_means = means;
  if (window_left >= 0) config.groups = {{{0}, -1}, {{1}, window_left, true}};
  return config;
}

// The group of a layer: each has one of its own, or all have one.
int32_t group_of(const KvCache& cache, size_t layer) {
  return cache.num_groups() == 1 ? 0 : static_cast<int32_t>(layer);
}

// f(layer, page id, head, token of the page) for those of a sequence's slots [begin(group),
// end(group)) of each layer's group that were not freed.
template <class Begin, class End, class F>
void for_slots(const KvCache& cache, SequenceId id, Begin&& begin, End&& end, F&& f) {
  const std::span<const ops::KvLayer> layers = KvCacheAccess::layers(cache);
  for (size_t i = 0; i < layers.size(); ++i) {
    const int32_t group = group_of(cache, i);
    for (int64_t slot = begin(group); slot < end(group); ++slot) {
      const int32_t page = cache.pages(id, group)[static_cast<size_t>(slot / kPage)];
      if (page < 0) continue;
      for (int32_t head = 0; head < layers[i].num_kv_heads; ++head) {
        f(layers[i], page, head, slot % kPage);
      }
    }
  }
}

float& key(const ops::KvLayer& layer, int32_t page, int32_t head, int64_t token, int64_t d) {
  return reinterpret_cast<float*>(layer.k_head(page, head))[ops::k_offset(token, d, kDim, 1)];
}

// Slots whose keys are there.
int64_t written(const KvCache& cache, SequenceId id, int32_t group) {
  return cache.slots(id, group) - (cache.length(id) - cache.committed(id));
}

// Of the keys of a unit.
void summarise(const ops::KvLayer& layer, int32_t page, int32_t head, int64_t first) {
  const ops::PageBounds& kept = layer.bounds;
  uint16_t* numbers =
      kept.of(page, head, layer.num_kv_heads, kDim) + first / kept.unit * kept.vectors * kDim;
  for (int64_t d = 0; d < kDim; ++d) {
    float least = std::numeric_limits<float>::infinity(), most = -least, sum = 0.0f;
    for (int64_t i = first; i < first + kept.unit; ++i) {
      const float x = key(layer, page, head, i, d);
      least = std::min(least, x);
      most = std::max(most, x);
      sum += x;
    }
    if (kept.vectors == 1) {
      numbers[d] = f32_to_bf16(sum / static_cast<float>(kept.unit));
    } else {
      numbers[d] = bf16_rounded(least, false);
      numbers[kDim + d] = bf16_rounded(most, true);
    }
  }
}

// Plays a kernel that wants the bounds of all full pages; returns how many it made.
int learn(const KvCache& cache, SequenceId id) {
  int made = 0;
  const auto begin = [](int32_t /*group*/) { return 0; };
  const auto end = [&](int32_t group) { return written(cache, id, group) / kPage * kPage; };
  for_slots(cache, id, begin, end,
            [&](const ops::KvLayer& layer, int32_t page, int32_t head, int64_t t) {
              int32_t& known = layer.bounds.known[page * layer.bounds.known_stride + head];
              if (t != 0 || known != 0) return;
              for (int64_t first = 0; first < kPage; first += layer.bounds.unit) {
                summarise(layer, page, head, first);
              }
              known = 1;
              ++made;
            });
  return made;
}

struct Player {
  explicit Player(int32_t unit, bool means = false, int32_t window_left = -1)
      : cache(config(unit, means, window_left)) {}

  std::mt19937 random{5};
  KvCache cache;
  std::vector<SequenceId> live;

  int64_t below(int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }

  void append(SequenceId id, int64_t count) {
    if (!cache.can_append(id, count)) return;
    cache.append(id, std::vector<int32_t>(static_cast<size_t>(count), 7));
    std::normal_distribution<float> normal;
    const auto scale = static_cast<float>(1 + below(9));
    const auto end = [&](int32_t group) { return cache.slots(id, group); };
    const auto begin = [&](int32_t group) { return end(group) - count; };
    for_slots(cache, id, begin, end,
              [&](const ops::KvLayer& layer, int32_t page, int32_t head, int64_t token) {
                for (int64_t d = 0; d < kDim; ++d) {
                  key(layer, page, head, token, d) = scale * normal(random);
                }
              });
  }
  void commit(SequenceId id) { cache.commit(id, cache.length(id) - cache.committed(id)); }

  // The tokens of a step, some of which are kept.
  void keep(SequenceId id) {
    append(id, 1 + below(40));
    std::vector<int32_t> rows;
    for (int64_t i = 0; i < cache.length(id) - cache.committed(id); ++i) {
      if (below(2) == 0) rows.push_back(static_cast<int32_t>(i));
    }
    cache.keep(id, rows);
  }

  void retain(SequenceId id) {
    std::vector<std::vector<int32_t>> slots(1);
    const bool cut = below(2) == 0;  // the last ones go
    const int64_t end = cut ? 1 + below(cache.slots(id)) : cache.slots(id);
    for (int64_t i = 0; i < end; ++i) {
      if (cut || below(8) != 0) slots[0].push_back(static_cast<int32_t>(i));
    }
    if (!slots[0].empty()) cache.retain(id, 0, slots);
  }

  void merge(SequenceId id) {
    const auto end = cache.slots(id);
    const auto first = static_cast<int32_t>(below(end));
    if (first + 1 >= end) return;
    cache.merge(id, 0, std::vector<KvMerge>{{1, first, {first, first + 1}, {3.0f, -2.0f}}});
  }

  // More than a few tokens are rarely allowed where a window's keys were freed.
  void rollback(SequenceId id) {
    const int64_t most = below(2) == 0 ? cache.length(id) : std::min<int64_t>(cache.length(id), 70);
    const int64_t count = below(most + 1);
    if (cache.is_prefix(id) && cache.can_rollback(id, count)) cache.rollback(id, count);
  }

  void reposition(SequenceId id) {
    std::vector<int64_t> from;
    for (int32_t g = 0; g < cache.num_groups(); ++g) from.push_back(below(cache.slots(id, g) + 1));
    cache.reposition(id, from, 3);
  }

  void play(SequenceId id) {
    switch (below(10)) {
      case 0:
        live.push_back(cache.fork(id));
        return;
      case 1:
        return rollback(id);
      case 2:
        return keep(id);
      case 3:
        return retain(id);
      case 4:
        return merge(id);
      case 5:
        return reposition(id);
      case 6:
        live.push_back(cache.import_(cache.export_(id)));
        return;
      case 7:
        cache.release(id);
        std::erase(live, id);
        return;
      default:
        append(id, 1 + below(200));
        commit(id);
    }
  }
};

TEST("bounds are rounded outwards, by less than the next bfloat16") {
  std::mt19937 random(5);
  std::uniform_int_distribution<uint32_t> bits;
  for (int i = 0; i < 20000; ++i) {
    const float x = std::bit_cast<float>(bits(random));
    const uint16_t down = bf16_rounded(x, false);
    const uint16_t up = bf16_rounded(x, true);
    if (std::isnan(x)) {
      CHECK(std::isnan(bf16_to_f32(down)) && std::isnan(bf16_to_f32(up)));
      continue;
    }
    CHECK(bf16_to_f32(down) <= x && x <= bf16_to_f32(up));
    // One step apart in the order of their bits, or the number itself.
    const bool is_bf16 = (std::bit_cast<uint32_t>(x) & 0xffff) == 0;
    CHECK_EQ(std::abs(up - down), is_bf16 ? 0 : 1);
  }
}

// Pages of a sequence that its window left behind, if there is one.
int64_t freed_pages(const KvCache& cache, SequenceId id) {
  return cache.num_groups() == 1
             ? 0
             : (cache.length(id) - cache.slots(id, 1)) / kPage +
                   std::ranges::count_if(cache.pages(id, 1), [](int32_t page) { return page < 0; });
}

void check_forgotten(int32_t unit, bool means = false, int32_t window_left = -1) {
  Player player(unit, means, window_left);
  int made = 0;
  int refused = 0;
  int64_t freed = 0;
  constexpr int kSteps = 1300 / check::kShare;
  for (int i = 0; i < kSteps; ++i) {
    KvCache& cache = player.cache;
    if (player.live.size() < 3) {
      player.live.push_back(cache.create(std::vector<int32_t>(300, 7)));
      player.append(player.live.back(), 1 + player.below(100));
      player.commit(player.live.back());
    }
    const size_t chosen =
        static_cast<size_t>(player.below(static_cast<int64_t>(player.live.size())));
    const SequenceId id = player.live[chosen];
    try {
      if (cache.slots(id) > 0) player.play(id);
    } catch (const OutOfMemory&) {
      ++refused;
    }
    cache.check_integrity();
    for (const SequenceId each : player.live) {
      made += learn(cache, each);
      freed += freed_pages(cache, each);
    }
    cache.check_integrity();
    while (player.live.size() > 6) {
      cache.release(player.live.back());
      player.live.pop_back();
    }
  }
  CHECK(made > kSteps * 6 / 13);
  CHECK(refused < kSteps * 10 / 13);
  CHECK(window_left < 0 || freed > kSteps * 10 / 13);
}

TEST("what is known of a page is forgotten when its keys change") {
  check_forgotten(16);
  check_forgotten(16, true);
  check_forgotten(32);
  check_forgotten(64);
}

TEST("and where pages behind a window become free and are others' pages then") {
  check_forgotten(16, false, 200);
  check_forgotten(16, true, 130);
  check_forgotten(64, false, 63);
}

void check_found(bool means, const char* what) {
  Player player(16, means);
  const SequenceId id = player.cache.create({});
  player.append(id, 64);
  player.commit(id);
  CHECK(learn(player.cache, id) == 4);
  player.cache.check_integrity();
  key(KvCacheAccess::layers(player.cache)[1], player.cache.pages(id)[0], 1, 5, 3) = 1000.0f;
  CHECK_THROWS(InternalError, what, player.cache.check_integrity());
}

TEST("bounds and means that are wrong are found") {
  check_found(false, "a key outside its bounds");
  check_found(true, "a mean of other keys");
}

}  // namespace

CHECK_MAIN()
