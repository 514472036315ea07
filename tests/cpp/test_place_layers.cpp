// Which layers two devices get by what their memories hold and how fast they are.
#include <vector>

#include "check.h"
#include "compiler/place_layers.h"

using effinfer::compiler::choose_layers;
using effinfer::compiler::LayerChoice;
using effinfer::compiler::LayerDevice;

namespace {

constexpr int32_t kLayers = 10;

// Layers take 100 bytes each there, and all of them 50 more.
LayerDevice device(const char* name, double rate, size_t free_bytes) {
  return {name, rate, free_bytes,
          [](int32_t count) { return count == 0 ? 0 : 50 + 100 * static_cast<size_t>(count); }};
}

bool contains(const LayerChoice& choice, const char* part) {
  return choice.reason.find(part) != std::string::npos;
}

}  // namespace

TEST("the faster device gets what fifteen sixteenths of its memory hold") {
  for (size_t free_bytes = 0; free_bytes < 1500; free_bytes += 7) {
    const size_t room = free_bytes - free_bytes / 16;
    int32_t most = 0;
    while (most < kLayers && 50 + 100 * static_cast<size_t>(most + 1) <= room) ++most;
    const LayerDevice gpu = device("cuda:0", 3e12, free_bytes);
    const LayerDevice cpu = device("cpu", 4e10, 1 << 20);
    CHECK_EQ(choose_layers(kLayers, gpu, cpu, false).front, most);
    CHECK_EQ(choose_layers(kLayers, cpu, gpu, false).front, kLayers - most);
  }
}

TEST("a device that is slower gets the rest") {
  const LayerDevice gpu = device("cuda:0", 3e10, 1 << 20);
  const LayerDevice cpu = device("cpu", 4e10, 700);
  CHECK_EQ(choose_layers(kLayers, gpu, cpu, false).front, 4);
  CHECK_EQ(choose_layers(kLayers, cpu, gpu, false).front, 6);
  CHECK(contains(choose_layers(kLayers, cpu, gpu, false),
                 "cpu reads memory at 40.0 GB/s and cuda:0 at 30.0 GB/s"));
}

TEST("reasons say what does not fit") {
  const LayerDevice cpu = device("cpu", 4e10, 1 << 20);
  const LayerDevice small{"cuda:0", 3e12, 2'000'000'000,
                          [](int32_t count) { return static_cast<size_t>(count) * 900'000'000; }};
  const LayerChoice two = choose_layers(kLayers, small, cpu, false);
  CHECK_EQ(two.front, 2);
  CHECK(contains(two, "of 2.0 GB that are free there 2 layers take 1.8 GB, and one more 2.7 GB"));
  const LayerDevice tiny = device("cuda:0", 3e12, 100);
  CHECK(contains(choose_layers(kLayers, tiny, cpu, false), "none is enough for a layer"));
}

TEST("two sets of cores share the layers by their rates, one at least each") {
  const auto front = [](double first, double second) {
    return choose_layers(kLayers, device("cpu", first, 0), device("cpu", second, 0), true).front;
  };
  CHECK_EQ(front(1e10, 1e10), 5);
  CHECK_EQ(front(3e10, 1e10), 8);
  CHECK_EQ(front(1e10, 4e10), 2);
  CHECK_EQ(front(1e10, 1e13), 1);
  CHECK_EQ(front(1e13, 1e10), 9);
}

CHECK_MAIN()
