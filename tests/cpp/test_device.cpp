// The seam of devices: names, memory, views, tables and options know on which device they are.
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
#include "ops/matmul.h"
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

CHECK_MAIN()
