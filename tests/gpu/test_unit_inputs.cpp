// As test_unit.cpp: what kernels before have written, which a kernel may begin before they have
// ended.
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "cpp/check.h"
#include "gpu/unit_kernels.h"

namespace effinfer::cuda {
namespace {

// Counts on after some time, hands a count on, or does neither.
struct CountOn {
  static constexpr const char* kName = "count_on";
  static constexpr int kThreads = 32;
  static constexpr bool kWaitsItself = true;
  struct Params {
    const uint32_t* zeros;
    int32_t loads;    // one behind the other
    uint32_t* count;  // or null
    const uint32_t* from;
    uint32_t* to;  // or null
  };
  struct Shared {};
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    unit.wait_for_inputs();
    uint32_t at = 0;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < p.loads; ++i) {
      at = unit.load_written(reinterpret_cast<const Quad*>(p.zeros + at)).words[0];
    }
    if (p.count != nullptr) p.count[unit.thread] += 1 + at;
    if (p.to != nullptr) p.to[unit.thread] = unit.load(p.from + unit.thread);
  }
};

// Those between have nothing to do, and begin and end while the slow one is at work: who has waited
// for them has waited for that, too.
TEST("wait_for_inputs: of all kernels before") {
  constexpr int kTimes = 50;
  const DeviceArray<uint32_t> zeros(std::vector<uint32_t>(4));
  const DeviceArray<uint32_t> count(std::vector<uint32_t>(32));
  const DeviceArray<uint32_t> seen(static_cast<size_t>(32 * kTimes));
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  const auto put = [&](const CountOn::Params& params) { launch<CountOn>(params, 1, *queue); };
  for (int time = 0; time < kTimes; ++time) {
    put({zeros.data(), 100, count.data(), nullptr, nullptr});
    for (int i = 0; i < time % 4; ++i) put({zeros.data(), 0, nullptr, nullptr, nullptr});
    put({zeros.data(), 0, nullptr, count.data(), seen.data() + 32 * time});
  }
  queue->wait();
  const std::vector<uint32_t> out = seen.values();
  for (size_t i = 0; i < out.size(); ++i) CHECK_EQ(out[i], static_cast<uint32_t>(i / 32 + 1));
}

struct LoadWritten {
  static constexpr const char* kName = "load_written";
  static constexpr int kThreads = 32;
  struct Params {
    const uint8_t* from;
    uint64_t* to;  // four of a thread
  };
  struct Shared {};
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int i = unit.thread;
    const Quad quad = unit.load_written(reinterpret_cast<const Quad*>(p.from + 16 * i));
    p.to[4 * i] = unit.load_written(reinterpret_cast<const uint16_t*>(p.from + 2 * i));
    p.to[4 * i + 1] = unit.load_written(reinterpret_cast<const uint64_t*>(p.from + 8 * i));
    p.to[4 * i + 2] = quad.words[0] | uint64_t{quad.words[1]} << 32;
    p.to[4 * i + 3] = quad.words[2] | uint64_t{quad.words[3]} << 32;
  }
};

TEST("load_written: of each width") {
  std::vector<uint8_t> bytes(512);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 37 + i / 256);
  const DeviceArray<uint8_t> from(bytes);
  const DeviceArray<uint64_t> to(size_t{128});
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  launch<LoadWritten>({from.data(), to.data()}, 1, *queue);
  queue->wait();
  const std::vector<uint64_t> out = to.values();
  const auto number = [&](size_t at, size_t size) {
    uint64_t value = 0;
    std::memcpy(&value, &bytes[at], size);
    return value;
  };
  for (size_t i = 0; i < 32; ++i) {
    CHECK_EQ(out[4 * i], number(2 * i, 2));
    CHECK_EQ(out[4 * i + 1], number(8 * i, 8));
    CHECK_EQ(out[4 * i + 2], number(16 * i, 8));
    CHECK_EQ(out[4 * i + 3], number(16 * i + 8, 8));
  }
}

}  // namespace
}  // namespace effinfer::cuda

CHECK_MAIN()
