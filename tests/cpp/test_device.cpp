// The seam of devices: names, memory, views, tables and options know on which device they are.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "check.h"
#include "core/cpu_detection.h"
#include "core/memory.h"
#include "effinfer/device.h"
#include "effinfer/error.h"
#include "effinfer/kv_cache.h"
#include "effinfer/ops/elementwise.h"
#include "effinfer/ops/norm.h"
#include "effinfer/threads.h"
#include "ops/attention.h"
#include "ops/bf16_products.h"
#include "ops/hash_index.h"
#include "ops/matmul.h"
#include "ops/page_index.h"
#include "ops/registry.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace effinfer;

namespace {

// What a build with another backend would have.
constexpr auto kOtherKind = static_cast<DeviceKind>(1);
constexpr Device kOther = {kOtherKind, 0};

struct Product {
  int64_t size;
};
std::string describe(const Product& problem) {
  return "[product] size=" + std::to_string(problem.size);
}
const char* never(const Product&) {
  return nullptr;
}
const char* always(const Product&) {
  return "is refused always";
}
void run(const Product&, Team&) {}

}  // namespace

TEST("devices: names round trip, an unknown one is refused with those of this build") {
  for (const Device device : available_devices()) CHECK(parse_device(name(device)) == device);
  CHECK_EQ(name(Device{}), "cpu");
  CHECK(Device{} != kOther && Device{} != (Device{DeviceKind::cpu, 1}));
  CHECK_THROWS(InvalidArgument, "[device]: expected \"cpu\", got \"tpu\"", parse_device("tpu"));
  CHECK_THROWS(InvalidArgument, "got \"cpu:1\"", parse_device("cpu:1"));
  CHECK_THROWS(InvalidArgument, "[load] device: expected \"cpu\", got \"cuda:0\"; CUDA: ",
               parse_device("cuda:0", "[load] device"));
  CHECK_THROWS(InvalidArgument, "[x] device: expected \"cpu\"", check_device(kOther, "[x] device"));
}

TEST("memory: every kind of page is aligned, written, copied and zeroed") {
  const Memory& memory = memory_of({});
  CHECK(memory.device() == Device{});
  CHECK(memory.capacity() > 0);
  for (const Pages pages : {Pages::heap, Pages::lazy, Pages::huge}) {
    for (const size_t bytes : {size_t{1}, size_t{1000}, size_t{5} << 20}) {
      const std::shared_ptr<void> block = memory.allocate(bytes, pages);
      CHECK(block != nullptr);
      const auto address = reinterpret_cast<uintptr_t>(block.get());
      CHECK_EQ(address % (pages == Pages::lazy ? 4096 : 64), 0u);
      auto* data = static_cast<uint8_t*>(block.get());
      if (pages != Pages::heap) CHECK(data[0] == 0 && data[bytes - 1] == 0);
      const std::vector<uint8_t> source(bytes, 7);
      std::vector<uint8_t> back(bytes);
      memory.copy(data, source.data(), bytes);
      memory.copy(back.data(), data, bytes);
      CHECK(back == source);
      memory.zero(data, bytes);
      CHECK(data[0] == 0 && data[bytes - 1] == 0);
    }
    CHECK(memory.allocate(SIZE_MAX / 2, pages) == nullptr);
    CHECK(memory.allocate(SIZE_MAX, pages) == nullptr);
  }
  CHECK_THROWS(InvalidArgument, "[memory] device: expected \"cpu\"", memory_of(kOther));
}

TEST("views of another device are refused by name") {
  ThreadPool pool(1);
  float values[4] = {1, 2, 3, 4};
  const StridedView here = StridedView::dense(values, DType::f32, {1, 4});
  StridedView there = here;
  there.device = kOther;
  const std::string expected = ": expected a tensor on cpu, got one on " + name(kOther);
  CHECK_THROWS(InvalidArgument, "[rmsnorm] out" + expected,
               ops::rmsnorm(here, {}, {}, there, pool));
  CHECK_THROWS(InvalidArgument, "[rmsnorm] input" + expected,
               ops::rmsnorm(there, {}, {}, here, pool));
  const TensorView a{values, DType::f32, {4}};
  const TensorView b{values, DType::f32, {4}, kOther};
  CHECK_THROWS(InvalidArgument, "[add] b" + expected, ops::add(a, b, values, pool));
}

TEST("tables: only a variant of the target's device is selected") {
  ops::Table<Product> table;
  table.add({"product.other", Isa::portable, never, run, nullptr, kOtherKind});
  const auto select = [&](const Target& target) { return table.select({3}, target).name; };
  CHECK_THROWS(Unsupported,
               "no kernel on cpu for [product] size=3\n  product.other: runs on another device",
               select({}));
  CHECK_EQ(select({kOther}), "product.other");
  table.add({"product.avx2", Isa::avx2, never, run});
  table.add({"product.amx", Isa::amx, always, run});
  CHECK_EQ(select({.isa = Isa::amx}), "product.avx2");
  CHECK_EQ(select({kOther, Isa::amx}), "product.other");
  CHECK_THROWS(Unsupported, "product.avx2: needs a higher ISA level", select({}));
  CHECK(current_target().device == Device{} && current_target().isa == current_isa());
}

// A processor with everything, less what a test takes away.
struct FakeProcessor {
  bool tile_state = true;
  bool bf16 = true;
  bool grants = true;
  int requests = 0;
};
FakeProcessor fake;

core::CpuidRegisters fake_cpuid(uint32_t leaf, uint32_t subleaf) {
  if (leaf == 7 && subleaf == 1 && !fake.bf16) return {};
  return {~0u, ~0u, ~0u, ~0u};
}
uint64_t fake_states() {
  return fake.tile_state ? 0x600e6 : 0xe6;
}
bool fake_request() {
  ++fake.requests;
  return fake.grants;
}

TEST("detection: tiles are a level only where the system was asked and granted them") {
  const core::Processor processor = {fake_cpuid, fake_states, fake_request};
  fake = {};
  CHECK(core::detect_features(processor).best == Isa::amx);
  CHECK_EQ(fake.requests, 1);
  fake = {.grants = false};
  CHECK(core::detect_features(processor).best == Isa::avx512);
  CHECK_EQ(fake.requests, 1);
  for (const FakeProcessor& lacking :
       {FakeProcessor{.tile_state = false}, FakeProcessor{.bf16 = false}}) {
    fake = lacking;
    CHECK(core::detect_features(processor).best == Isa::avx512);
    CHECK_EQ(fake.requests, 0);
  }
}

CpuFeatures described(bool has_bf16, const char* signature) {
  CpuFeatures features;
  features.avx512_bf16 = has_bf16;
  features.signature = signature;
  features.fast_bf16 = has_bf16 && core::has_fast_bf16(signature);
  return features;
}
const CpuFeatures kZen5 = described(true, "AuthenticAMD-26-2-1-1024K-32768K");
const CpuFeatures kSapphireRapids = described(true, "GenuineIntel-6-143-8-2048K-491520K");

TEST("bfloat16: chosen in vectors by the CPU's maker, in tiles everywhere") {
  CHECK(core::has_fast_bf16("AuthenticAMD-25-17-1-1024K-32768K"));
  CHECK(kZen5.fast_bf16 && !kSapphireRapids.fast_bf16);
  for (const char* other : {"GenuineIntel-6-85-11-1024K-36608K", "HygonGenuine-24-1-1-0K-0K", ""}) {
    CHECK(!core::has_fast_bf16(other));
  }
  const std::string why = "; vectors multiply float32, which is faster on this CPU";
  CHECK_EQ(describe_bf16(Isa::amx, kSapphireRapids), "tiles" + why);
  CHECK_EQ(describe_bf16(Isa::avx512, kSapphireRapids), "none" + why);
  CHECK_EQ(describe_bf16(Isa::amx, kZen5), "tiles and vectors");
  CHECK_EQ(describe_bf16(Isa::avx512, kZen5), "vectors");
  CHECK_EQ(describe_bf16(Isa::avx2, kZen5), "none at this level");
  CHECK_EQ(describe_bf16(Isa::amx, described(false, "")), "none at this level");
  CHECK(cpu_features().avx512_bf16 || !cpu_features().fast_bf16);
}

TEST("bfloat16: the choice follows from the table of kernels, the shape and the CPU") {
  if (!cpu_features().avx512_bf16) check::skip("this CPU has no AVX512-BF16");
  const ops::MatmulProblem matmul = ops::smallest_matmul(ops::Arithmetic::bf16);
  ops::AttentionProblem attention;
  attention.num_qo_heads = attention.num_kv_heads = 1;
  attention.arithmetic = ops::Arithmetic::bf16;
  attention.q.dtype = attention.k.dtype = attention.v.dtype = DType::bf16;
  const auto pays = [&](int32_t head_dim, bool decode, Isa isa, const CpuFeatures& features) {
    attention.k.dims = attention.v.dims = head_dim;
    attention.decode = decode;
    return ops::bf16_pays(attention, {.isa = isa}, features);
  };
  for (const bool decode : {false, true}) {
    CHECK(!pays(64, decode, Isa::avx512, kSapphireRapids));
    CHECK(pays(64, decode, Isa::avx512, kZen5));
    CHECK(!pays(64, decode, Isa::avx2, kZen5));
  }
  CHECK(!ops::bf16_pays(matmul, {.isa = Isa::avx512}, kSapphireRapids));
  CHECK(ops::bf16_pays(matmul, {.isa = Isa::avx512}, kZen5));
  CHECK(!ops::bf16_pays(matmul, {.isa = Isa::avx2}, kZen5));
  const auto is_tiles = [](const auto& variant) { return variant.isa == Isa::amx; };
  if (std::ranges::none_of(ops::table<ops::AttentionProblem>().variants(), is_tiles)) return;
  CHECK(ops::bf16_pays(matmul, {.isa = Isa::amx}, kSapphireRapids));
  CHECK(pays(64, false, Isa::amx, kSapphireRapids));
  // A few rows, and dimensions that fill no tiles, are for vectors.
  CHECK(!pays(64, true, Isa::amx, kSapphireRapids));
  CHECK(!pays(80, false, Isa::amx, kSapphireRapids));
  CHECK(pays(80, false, Isa::amx, kZen5));
}

// Run alone by ctest, so that nothing else has asked before.
TEST("whoever has a table may run tiles") {
#if defined(__x86_64__)
  std::ifstream cpuinfo("/proc/cpuinfo");
  const std::string text((std::istreambuf_iterator<char>(cpuinfo)), {});
  if (text.find(" amx_tile") == std::string::npos) check::skip("this CPU has no AMX");
  ops::table<ops::MatmulProblem>();
  constexpr int kArchGetXcompPerm = 0x1022;
  uint64_t permitted = 0;
  CHECK_EQ(syscall(SYS_arch_prctl, kArchGetXcompPerm, &permitted), 0);
  CHECK((permitted >> 18 & 1) == 1);
#else
  check::skip("no AMX on this architecture");
#endif
}

TEST("a KV cache on a device that this build lacks is refused") {
  CHECK_THROWS(InvalidArgument, "[memory] device: expected \"cpu\"",
               KvCache(KvCacheConfig{1, 1, 16, DType::f32, 2, kOther}));
}

TEST("indices of generated rows are refused by name where they have no kernel") {
  ops::PageIndexProblem problem;
  problem.kv.num_kv_heads = 1;
  const auto select = [&](int32_t unit) {
    problem.unit = unit;
    return ops::table<ops::PageIndexProblem>().select(problem, {.device = kOther}).name;
  };
  const std::string expected = "no kernel on " + name(kOther) + " for ";
  CHECK_THROWS(Unsupported, expected + "[page_index]", select(16));
  CHECK_THROWS(Unsupported, expected + "[key_index]", select(1));
  ops::HashIndexProblem drawn;
  drawn.kv.num_kv_heads = 1;
  CHECK_THROWS(Unsupported, expected + "[hash_index]",
               ops::table<ops::HashIndexProblem>().select(drawn, {.device = kOther}));
}

CHECK_MAIN()
