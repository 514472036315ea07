// A KV cache on a GPU whose pages are encoded: the bytes of the CPU's, whatever is done to it, and
// how many pages it holds.
#include <algorithm>
#include <random>
#include <span>
#include <vector>

#include "core/float16.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "effinfer/kv_cache.h"
#include "effinfer/threads.h"
#include "gpu/device_arrays.h"
#include "gpu/paths.h"
#include "kv/kv_access.h"

namespace effinfer {
namespace {

// `devices`: of each of three layers.
KvCacheConfig config_of(DType dtype, const KvCoding& coding, std::vector<Device> devices,
                        int32_t num_pages) {
  KvCacheConfig config{3, 2, 32, dtype, num_pages};
  config.layer_devices = std::move(devices);
  const std::vector<float> frequencies = {1.0f, 0.3f, 0.1f, 0.02f, 0.007f};
  config.rope = {{frequencies}, {}, {frequencies, true}};
  config.coding = coding;
  return config;
}

const std::vector<Device> kOnGpu = {kGpu, kGpu, kGpu};

std::shared_ptr<const std::vector<uint16_t>> numbers(size_t count, float scale) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<uint16_t> bits(count);
  for (uint16_t& x : bits) x = f32_to_bf16(normal(random));
  return std::make_shared<const std::vector<uint16_t>>(std::move(bits));
}
KvCoding vectors() {
  return {.bits = 2, .residual = 10, .codebooks = numbers(3 * 2 * 2 * 32 * 256, 1.0f)};
}
KvCoding features(int32_t shared) {
  KvCoding coding = {.bits = 4, .residual = 40, .features = 32, .shared_layers = shared};
  coding.basis = numbers(3 * 2 * 32 * 64, 0.125f);
  return coding;
}

// A page of all layers gets the same random numbers on any device.
void fill(KvCache& cache, int32_t page, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  int32_t layer = 0;
  for (const ops::KvLayer& kv : KvCacheAccess::layers(cache)) {
    const Device device = cache.config().device_of(layer++);
    const size_t bytes = kv.head_bytes() * static_cast<size_t>(kv.num_kv_heads);
    for (uint8_t* plane : {kv.k_head(page, 0), kv.v_head(page, 0)}) {
      std::vector<float> wide(bytes / 4);
      std::vector<uint16_t> narrow(bytes / 2);
      for (float& x : wide) x = normal(random);
      for (uint16_t& x : narrow) x = f32_to_bf16(normal(random));
      const bool is_wide = kv.dtype == DType::f32;
      memory_of(device).copy(plane, is_wide ? static_cast<const void*>(wide.data()) : narrow.data(),
                             bytes);
    }
  }
}

void append(KvCache& cache, SequenceId id, int32_t count, uint32_t seed) {
  const auto first = static_cast<size_t>(cache.slots(id) / 64);
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<int32_t>((cache.length(id) + i) % 1000));
  }
  cache.append(id, tokens);
  for (size_t i = first; i < cache.pages(id).size(); ++i) {
    fill(cache, cache.pages(id)[i], seed + static_cast<uint32_t>(i));
  }
  cache.commit(id, count);
}

// Both caches do the same, and export the same.
void check_verbs(const KvCoding& coding, DType dtype, uint32_t seed,
                 const std::vector<Device>& devices = kOnGpu) {
  ThreadPool pool(2);
  std::mt19937 random(seed);
  KvCache host(config_of(dtype, coding, {}, 24));
  KvCache gpu(config_of(dtype, coding, devices, 24));
  std::vector<SequenceId> sequences;
  int64_t encoded = 0;
  constexpr int kSteps = 150;
  for (int step = 0; step < kSteps; ++step) {
    const uint32_t action = sequences.size() < 2 ? 0 : random() % 10;
    const uint32_t drawn = random();
    const size_t which = sequences.empty() ? 0 : random() % sequences.size();
    const SequenceId id = sequences.empty() ? 0 : sequences[which];
    const bool has_room = sequences.empty() || gpu.can_append(id, 90);
    const bool encodes = !sequences.empty() && gpu.can_encode(id) && host.can_encode(id);
    std::vector<SequenceId> created;
    for (KvCache* cache : {&host, &gpu}) {
      if (action == 0) {
        if (sequences.size() < 4) created.push_back(cache->create({}));
      } else if (action == 1) {
        if (sequences.size() < 4) created.push_back(cache->fork(id));
      } else if (action == 2) {
        cache->release(id, false);
      } else if (action == 3) {
        const auto count = static_cast<int64_t>(drawn) % (cache->length(id) + 1);
        if (cache->can_rollback(id, count)) cache->rollback(id, count);
      } else if (action == 4) {
        const std::vector<std::byte> blob = cache->export_(id);
        cache->release(id, false);
        created.push_back(cache->import_(blob));
      } else if (action < 7) {
        if (encodes) cache->encode(id, pool);
      } else if (has_room) {
        append(*cache, id, static_cast<int32_t>(1 + drawn % 90), drawn);
      }
      cache->check_integrity();
    }
    if (action == 2 || action == 4) {
      sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(which));
    }
    if (!created.empty()) {
      CHECK_EQ(created[0], created[1]);
      sequences.push_back(created[0]);
    }
    for (const SequenceId each : sequences) {
      CHECK_EQ(host.encoded_pages(each), gpu.encoded_pages(each));
      CHECK(host.export_(each) == gpu.export_(each));
      encoded += gpu.encoded_pages(each);
    }
  }
  CHECK(encoded > kSteps / 4);
  for (const SequenceId id : sequences) gpu.release(id, false);
  CHECK_EQ(gpu.free_pages(), 24);
  CHECK_EQ(gpu.used_bytes(), size_t{0});
}

// Encoded pages, each of which was one of bf16 first.
int64_t most_encoded(const KvCoding& coding, int32_t num_pages) {
  ThreadPool pool(1);
  KvCache cache(config_of(DType::bf16, coding, kOnGpu, num_pages));
  const SequenceId id = cache.create({});
  while (cache.can_append(id, 64)) {
    append(cache, id, 64, 1);
    cache.encode(id, pool);
    cache.check_integrity();
  }
  return cache.encoded_pages(id);
}

}  // namespace

TEST("the bytes of the CPU's cache") {
  uint32_t seed = 0;
  constexpr DType kTypes[] = {DType::bf16, DType::f32};
  for (const DType dtype : of_one_path(kTypes)) {
    check_verbs({.bits = 4, .residual = 64}, dtype, ++seed);
    check_verbs({.bits = 2, .residual = 0}, dtype, ++seed);
    check_verbs({.bits = 2, .residual = 30, .rank = 2, .outliers = 5}, dtype, ++seed);
    check_verbs(vectors(), dtype, ++seed);
    for (const int32_t shared : {1, 2, 3}) check_verbs(features(shared), dtype, ++seed);
  }
}

TEST("the same where a GPU and the host have some layers each") {
  uint32_t seed = 40;
  check_verbs({.bits = 4, .residual = 64}, DType::bf16, ++seed, {kGpu, {}, kGpu});
  check_verbs(vectors(), DType::bf16, ++seed, {{}, kGpu, kGpu});
  check_verbs(features(2), DType::f32, ++seed, {{}, {}, kGpu});
  CHECK_THROWS(Unsupported, "share features on one device, got some on cpu and cuda:0",
               KvCache(config_of(DType::bf16, features(3), {{}, {}, kGpu}, 8)));
}

// Of keys, and of values, 4 bits take 28 and 31 % of heads of 32, so that a page has room for 3;
// 2 bits 19 %: 5.
TEST("three pages of 4 bits, or five of 2, take the memory of one") {
  CHECK_EQ(most_encoded({.bits = 4, .residual = 0}, 9), 3 * 8 + 1);
  CHECK_EQ(most_encoded({.bits = 2, .residual = 0}, 9), 5 * 8 + 1);
  // Vectors take 1 / 8, beside the row of a page's place.
  KvCoding coded = vectors();
  coded.residual = 0;
  CHECK_EQ(most_encoded(coded, 9), 7 * 8 + 1);
}

TEST("cached prefixes give way where what is made of shared pages needs room") {
  ThreadPool pool(1);
  KvCache cache(config_of(DType::bf16, {.bits = 4, .residual = 0}, kOnGpu, 7));
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 400; ++i) tokens.push_back(i);
  const SequenceId id = cache.create(tokens);
  append(cache, id, 400, 5);
  cache.publish(id);
  CHECK_EQ(cache.cached_prefix_pages(), 6);
  const SequenceId other = cache.fork(id);
  CHECK(!cache.can_encode(id));
  CHECK_THROWS(OutOfMemory, "encode", cache.encode(id, pool));
  cache.check_integrity();
  cache.release(other, false);
  CHECK(cache.can_encode(id));
  cache.encode(id, pool);
  cache.check_integrity();
  CHECK_EQ(cache.encoded_pages(id), 6);
  CHECK_EQ(cache.cached_prefix_pages(), 0);
  CHECK_EQ(cache.free_pages(), 7 - 1 - 2);
}

TEST("what does not fit where a page was is refused") {
  KvCacheConfig config{1, 1, 16, DType::bf16, 4};
  config.device = kGpu;
  config.coding = {.bits = 4, .rank = 16, .outliers = 256};
  CHECK_THROWS(Unsupported, "on a GPU an encoded page lies where", KvCache{config});
}

}  // namespace effinfer

CHECK_MAIN()
