// A KV cache whose layers are on two devices: the same bytes as on one, whatever is done to it.
#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "cpp/check.h"
#include "effinfer/error.h"
#include "effinfer/kv_cache.h"
#include "gpu/device_arrays.h"
#include "kv/kv_access.h"

using namespace effinfer;

namespace {

using Bytes = std::vector<uint8_t>;

// Of a layer of a cache: K, V, and the scales of both.
struct Planes {
  uint8_t* first[4];
  size_t bytes[4];
};

Planes planes_of(const KvCache& cache, int32_t layer) {
  const ops::KvLayer& kv = KvCacheAccess::layers(cache)[static_cast<size_t>(layer)];
  const auto heads = static_cast<size_t>(kv.num_pages) * static_cast<size_t>(kv.num_kv_heads);
  const size_t scales = kv.k_scale == nullptr ? 0 : heads * ops::kPageSize * sizeof(float);
  const auto bytes_of = [](float* scale) { return reinterpret_cast<uint8_t*>(scale); };
  return {{kv.k, kv.v, bytes_of(kv.k_scale), bytes_of(kv.v_scale)},
          {heads * kv.head_bytes(), heads * kv.head_bytes(), scales, scales}};
}

// A page of all layers and planes gets random bytes, of which numbers of any type are finite.
void fill(KvCache& cache, int32_t page, uint32_t seed) {
  std::mt19937 random(seed);
  for (int32_t layer = 0; layer < cache.config().num_layers; ++layer) {
    const Planes planes = planes_of(cache, layer);
    for (size_t i = 0; i < 4; ++i) {
      Bytes bytes(planes.bytes[i] / static_cast<size_t>(cache.config().num_pages));
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() & 0xbf);
      if (bytes.empty()) continue;
      memory_of(cache.config().device_of(layer))
          .copy(planes.first[i] + static_cast<size_t>(page) * bytes.size(), bytes.data(),
                bytes.size());
    }
  }
}

Bytes all_bytes(const KvCache& cache) {
  Bytes all;
  for (int32_t layer = 0; layer < cache.config().num_layers; ++layer) {
    const Planes planes = planes_of(cache, layer);
    for (size_t i = 0; i < 4; ++i) {
      if (planes.bytes[i] == 0) continue;
      Bytes bytes(planes.bytes[i]);
      memory_of(cache.config().device_of(layer)).copy(bytes.data(), planes.first[i], bytes.size());
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
  }
  return all;
}

KvCacheConfig config_of(DType dtype, std::vector<Device> devices) {
  KvCacheConfig config{3, 2, 16, dtype, 14};
  config.layer_devices = std::move(devices);
  const std::vector<float> frequencies = {1.0f, 0.3f, 0.1f, 0.02f, 0.007f};
  config.rope = {{frequencies}, {}, {frequencies, true}};
  return config;
}

// Ascending slots, at least one; `most` of them at most.
std::vector<int32_t> some_slots(int64_t num_slots, size_t most, std::mt19937& random) {
  std::vector<int32_t> slots(static_cast<size_t>(num_slots));
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), random);
  slots.resize(std::min(most, slots.size()));
  std::sort(slots.begin(), slots.end());
  return slots;
}

// One of the verbs that change which keys a sequence has, the same for the same seed.
void change_keys(KvCache& cache, SequenceId id, uint32_t seed) {
  std::mt19937 random(seed);
  const int64_t slots = cache.slots(id);
  const uint32_t verb = random() % 5;
  const size_t heads = 3 * 2;
  if (verb < 2) {
    const size_t count = 1 + random() % static_cast<size_t>(slots);
    std::vector<std::vector<int32_t>> lists(verb == 0 ? 1 : heads);
    for (auto& list : lists) list = some_slots(slots, count, random);
    cache.retain(id, 0, lists);
  } else if (verb == 2) {
    const auto begin = static_cast<int64_t>(random() % static_cast<uint32_t>(slots));
    const int64_t most = slots - begin - (begin == 0 ? 1 : 0);
    // Whole pages go in the table, and of some others tokens are copied.
    const int64_t count = slots > 70 && begin < slots - 64 ? 64 : most;
    cache.evict(id, 0, begin, begin + std::min(count, most));
  } else if (verb == 3) {
    std::vector<KvMerge> merges;
    for (int32_t head = 0; head < 6; ++head) {
      const std::vector<int32_t> from = some_slots(slots, 3, random);
      const std::vector<float> weights(from.size(), 1.0f / static_cast<float>(from.size()));
      merges.push_back({head, from.front(), from, weights});
    }
    cache.merge(id, 0, merges);
  } else {
    const auto from = static_cast<int64_t>(random() % static_cast<uint32_t>(slots));
    cache.reposition(id, std::vector<int64_t>{from}, 5 - static_cast<int64_t>(random() % 9));
  }
}

// Appends to both, and drops keys of a group now and then.
void check_same_tables(KvCache& alone, KvCache& there) {
  std::mt19937 random(6);
  const SequenceId id = alone.create({});
  CHECK_EQ(there.create({}), id);
  for (int step = 0; step < 30; ++step) {
    const uint32_t seed = random();
    for (KvCache* cache : {&alone, &there}) {
      std::mt19937 own(seed);
      const auto group = static_cast<int32_t>(own() % 2);
      const int64_t slots = cache->slots(id, group);
      if (slots > 120) {
        std::vector<std::vector<int32_t>> lists(2);
        const size_t count = 1 + own() % static_cast<size_t>(slots);
        for (auto& list : lists) list = some_slots(slots, count, own);
        cache->retain(id, group, lists);
      } else {
        cache->append(id, std::vector<int32_t>(50, 1));
        for (int32_t each = 0; each < 3; ++each) {
          fill(*cache, cache->pages(id, each).back(), static_cast<uint32_t>(own()));
        }
        cache->commit(id, 50);
      }
      cache->check_integrity();
    }
    for (int32_t group = 0; group < 3; ++group) {
      CHECK_EQ(alone.slots(id, group), there.slots(id, group));
      CHECK(std::ranges::equal(alone.pages(id, group), there.pages(id, group)));
    }
    CHECK(all_bytes(alone) == all_bytes(there));
  }
}

}  // namespace

TEST("pages are copied, closed up and zeroed in each memory") {
  for (const DType dtype : {DType::bf16, DType::i8, DType::f32}) {
    KvCache alone(config_of(dtype, {}));
    KvCache apart(config_of(dtype, {kGpu, {}, kGpu}));
    CHECK_EQ(alone.num_bytes(), apart.num_bytes());
    std::mt19937 random(4);
    std::vector<SequenceId> sequences;
    int changes = 0;
    for (int step = 0; step < 160; ++step) {
      const uint32_t action = random() % 8;
      const uint32_t seed = random();
      const size_t which = sequences.empty() ? 0 : random() % sequences.size();
      std::vector<SequenceId> created;
      for (KvCache* cache : {&alone, &apart}) {
        if (sequences.size() < 2 || (action == 0 && sequences.size() < 4)) {
          created.push_back(cache->create({}));
          continue;
        }
        const SequenceId id = sequences[which];
        if (action == 1 && sequences.size() < 4) {
          created.push_back(cache->fork(id));
        } else if (action >= 6 && cache->slots(id) > 1 && cache->free_pages() > 6) {
          change_keys(*cache, id, seed);
          ++changes;
        } else if (action == 2) {
          cache->release(id, false);
        } else if (action == 3) {
          const auto count = static_cast<int64_t>(seed) % (cache->length(id) + 1);
          if (cache->can_rollback(id, count)) cache->rollback(id, count);
        } else if (cache->can_append(id, 20)) {
          const std::vector<int32_t> tokens(20, 1);
          const auto before = static_cast<size_t>(cache->slots(id));
          cache->append(id, tokens);
          for (size_t page = before / 64; page < cache->pages(id).size(); ++page) {
            fill(*cache, cache->pages(id)[page], seed + static_cast<uint32_t>(page));
          }
          cache->keep(id, std::vector<int32_t>{0, 1, 5, 6, 11, 19});
        }
        cache->check_integrity();
      }
      if (!created.empty()) {
        CHECK_EQ(created[0], created[1]);
        sequences.push_back(created[0]);
      } else if (action == 2) {
        sequences.erase(sequences.begin() + static_cast<ptrdiff_t>(which));
      }
      CHECK(all_bytes(alone) == all_bytes(apart));
    }
    CHECK(changes > 40);
  }
}

TEST("groups of layers have page tables of their own, on a GPU and on two devices") {
  const std::vector<std::vector<Device>> places = {{kGpu, kGpu, kGpu}, {kGpu, {}, kGpu}};
  for (const std::vector<Device>& devices : places) {
    for (const DType dtype : {DType::bf16, DType::i8}) {
      KvCacheConfig config = config_of(dtype, {});
      config.groups = {{{0}, -1}, {{1}, -1}, {{2}, 70}};
      KvCache alone(config);
      config.layer_devices = devices;
      KvCache there(config);
      check_same_tables(alone, there);
    }
  }
}

TEST("what is read, exported and imported does not depend on whose memory it is") {
  for (const DType dtype : {DType::f16, DType::i8}) {
    KvCache alone(config_of(dtype, {}));
    KvCache apart(config_of(dtype, {kGpu, {}, kGpu}));
    std::vector<std::byte> blob;
    std::vector<float> all;
    for (KvCache* cache : {&alone, &apart}) {
      const SequenceId id = cache->create({});
      cache->append(id, std::vector<int32_t>(100, 1));
      for (const int32_t page : cache->pages(id)) fill(*cache, page, static_cast<uint32_t>(page));
      cache->commit(id, 100);
      std::vector<float> rows;
      for (int32_t head = 0; head < 6; ++head) {
        std::vector<float> keys(100 * 16);
        std::vector<float> values(100 * 16);
        cache->read(id, 0, head, keys, values);
        rows.insert(rows.end(), keys.begin(), keys.end());
        rows.insert(rows.end(), values.begin(), values.end());
      }
      if (cache == &alone) {
        all = rows;
        blob = cache->export_(id);
      }
      CHECK(rows == all);
      CHECK(cache->export_(id) == blob);
      const SequenceId twin = cache->import_(blob);
      CHECK(cache->export_(twin) == blob);
      cache->check_integrity();
    }
  }
}

TEST("devices that are not one a layer, or not there, are refused") {
  CHECK_THROWS(InvalidArgument, "layer_devices: expected none or one a layer, got 2",
               KvCache cache(config_of(DType::bf16, {kGpu, {}})));
  CHECK_THROWS(InvalidArgument, "got \"cuda:3\"",
               KvCache cache(config_of(DType::bf16, {kGpu, {}, {DeviceKind::cuda, 3}})));
  KvCacheConfig huge = config_of(DType::f32, {kGpu, {}, {}});
  huge.num_pages = 1 << 27;  // 2 TB a layer
  CHECK_THROWS(OutOfMemory, "134217728 pages takes 2199023255552 bytes, cuda:0 has",
               KvCache cache(huge));
}

CHECK_MAIN()
