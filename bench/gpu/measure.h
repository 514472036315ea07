// What the benchmarks of GPU kernels share: how long a call takes, rows of output, random bytes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "bench/gpu/device.h"
#include "bench/kernel_bench.h"
#include "gpu/device_arrays.h"

namespace bench {

struct Settings {
  double rotate_bytes;  // that calls in turn read at least, so that caches hold none of it
  int replays;
  int least_calls;  // of a recording
};

// More would only be small arrays, which a cache holds in a real step, too.
constexpr int kMostCopies = 512;

inline int copies_of(int64_t bytes, const Settings& settings) {
  const double copies = std::ceil(settings.rotate_bytes / static_cast<double>(bytes));
  return static_cast<int>(std::clamp(copies, 1.0, double{kMostCopies}));
}

// Seconds of one of a row of calls, of which call number i works on copy i.
inline Timing measure(effinfer::Queue& queue, const Settings& settings, int copies,
                      const std::function<void(int)>& call) {
  // A kernel is loaded when it is first launched, which cannot be recorded.
  call(0);
  queue.wait();
  const int rounds = (settings.least_calls + copies - 1) / copies;
  const auto recording = record(queue, [&] {
    for (int i = 0; i < rounds * copies; ++i) call(i % copies);
  });
  recording->run();
  std::vector<double> times;
  for (int i = 0; i < settings.replays; ++i) times.push_back(recording->run() / (rounds * copies));
  return summary(times);
}

// A JSON object a line on stdout: `what` (members), and what a call took and moved.
inline void print_row(const std::string& what, const Timing& time, int64_t bytes, double flops) {
  std::printf("{%s, \"bytes\": %lld, \"flops\": %.0f, \"median_us\": %.3f, \"best_us\": %.3f}\n",
              what.c_str(), static_cast<long long>(bytes), flops, 1e6 * time.median,
              1e6 * time.best);
  std::fflush(stdout);
}

inline std::string member(const char* key, const std::string& value) {
  return std::string("\"").append(key).append("\": \"").append(value).append("\"");
}
inline std::string member(const char* key, int64_t value) {
  return std::string("\"").append(key).append("\": ").append(std::to_string(value));
}

// Finite whatever they are read as: the upper byte of any 16 bits gets a small exponent.
inline std::vector<uint8_t> random_bytes(size_t count) {
  std::vector<uint8_t> bytes((count + 7) / 8 * 8);
  uint64_t state = 1;
  for (size_t i = 0; i < bytes.size(); i += 8) {
    state += 0x9e3779b97f4a7c15;  // splitmix64
    uint64_t x = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    x = ((x ^ (x >> 31)) & 0x83ff83ff83ff83ff) | 0x2800280028002800;
    std::memcpy(bytes.data() + i, &x, 8);
  }
  bytes.resize(count);
  return bytes;
}

// bfloat16 numbers between -2 and 2.
inline std::vector<uint16_t> random_bf16(size_t count) {
  const std::vector<uint8_t> bytes = random_bytes(count * 2);
  std::vector<uint16_t> numbers(count);
  std::memcpy(numbers.data(), bytes.data(), count * 2);
  for (uint16_t& x : numbers) x = static_cast<uint16_t>((x & 0x83ff) | 0x3c00);
  return numbers;
}

// The same bytes again and again.
inline effinfer::DeviceArray<uint8_t> filled(int64_t size, const void* pattern, int64_t period) {
  effinfer::DeviceArray<uint8_t> array(static_cast<size_t>(size));
  const effinfer::Memory& memory = effinfer::memory_of(effinfer::kGpu);
  for (int64_t at = 0; at < size;) {
    // From the second time on inside the device: what is there doubles.
    const int64_t bytes = std::min(size - at, at == 0 ? period : at);
    memory.copy(array.data() + at, at == 0 ? pattern : array.data(), static_cast<size_t>(bytes));
    at += bytes;
  }
  return array;
}

// Ends the program unless a kernel's results are numbers, not all zero.
inline void check_results(const std::vector<float>& results, const std::string& what) {
  double sum = 0;
  for (const float x : results) sum += std::abs(x);
  if (std::isfinite(sum) && sum > 0) return;
  std::fprintf(stderr, "%s: results are %s\n", what.c_str(), sum == 0 ? "zeros" : "not finite");
  std::exit(1);
}

inline std::vector<float> widened(const std::vector<uint16_t>& bf16) {
  std::vector<float> out(bf16.size());
  for (size_t i = 0; i < out.size(); ++i) {
    const uint32_t bits = uint32_t{bf16[i]} << 16;
    std::memcpy(&out[i], &bits, 4);
  }
  return out;
}

// Each returns how many rows it printed.
int bench_copy(Options& options, const Settings& settings, effinfer::Queue& queue);
int bench_matmul(Options& options, const Settings& settings, effinfer::Queue& queue);
int bench_prefill(Options& options, const Settings& settings, effinfer::Queue& queue);
int bench_ternary(Options& options, const Settings& settings, effinfer::Queue& queue);
int bench_attention(Options& options, const Settings& settings, effinfer::Queue& queue);
int bench_prompts(Options& options, const Settings& settings, effinfer::Queue& queue);
int bench_model(Options& options, const Settings& settings, effinfer::Queue& queue);
int bench_step(Options& options, const Settings& settings, effinfer::Queue& queue);
int bench_norms(Options& options, const Settings& settings, effinfer::Queue& queue);
int bench_sampling(Options& options, const Settings& settings, effinfer::Queue& queue);

}  // namespace bench
