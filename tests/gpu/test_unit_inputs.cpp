// As test_unit.cpp: kernels that begin before those before them have ended.
#include <cstdint>
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

}  // namespace
}  // namespace effinfer::cuda

CHECK_MAIN()
