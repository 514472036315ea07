// A KV cache whose layers are on two devices: the same bytes as on one, whatever is done to it.
#include <algorithm>
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

// A page of all layers and planes gets random bytes.
void fill(KvCache& cache, int32_t page, uint32_t seed) {
  std::mt19937 random(seed);
  for (int32_t layer = 0; layer < cache.config().num_layers; ++layer) {
    const Planes planes = planes_of(cache, layer);
    for (size_t i = 0; i < 4; ++i) {
      Bytes bytes(planes.bytes[i] / static_cast<size_t>(cache.config().num_pages));
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
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
  KvCacheConfig config{3, 2, 16, dtype, 7};
  config.layer_devices = std::move(devices);
  return config;
}

}  // namespace

TEST("pages are copied, closed up and zeroed in each memory") {
  for (const DType dtype : {DType::bf16, DType::i8, DType::f32}) {
    KvCache alone(config_of(dtype, {}));
    KvCache apart(config_of(dtype, {kGpu, {}, kGpu}));
    CHECK_EQ(alone.num_bytes(), apart.num_bytes());
    std::mt19937 random(4);
    std::vector<SequenceId> sequences;
    for (int step = 0; step < 120; ++step) {
      const uint32_t action = random() % 6;
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
        } else if (action == 2) {
          cache->release(id, false);
        } else if (action == 3) {
          cache->rollback(id, static_cast<int64_t>(seed) % (cache->length(id) + 1));
        } else if (cache->can_append(id, 20)) {
          const std::vector<int32_t> tokens(20, 1);
          const auto before = static_cast<size_t>(cache->length(id));
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
  }
}

TEST("devices that are not one a layer, or not there, are refused") {
  CHECK_THROWS(InvalidArgument, "layer_devices: expected none or one a layer, got 2",
               KvCache cache(config_of(DType::bf16, {kGpu, {}})));
  CHECK_THROWS(InvalidArgument, "got \"cuda:3\"",
               KvCache cache(config_of(DType::bf16, {kGpu, {}, {DeviceKind::cuda, 3}})));
  KvCacheConfig huge = config_of(DType::f32, {kGpu, {}, {}});
  huge.num_pages = 1 << 20;  // 16 GB a layer
  CHECK_THROWS(OutOfMemory, "1048576 pages takes 17179869184 bytes, cuda:0 has",
               KvCache cache(huge));
}

CHECK_MAIN()
