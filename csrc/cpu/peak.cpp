#include "cpu/peak.h"

#include <time.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/level.h"
#include "effinfer/error.h"
#include "effinfer/profile.h"

namespace effinfer {
namespace {

constexpr int64_t kRounds = 1 << 18;  // a millisecond
constexpr int kRepeats = 7;

double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Null where nothing is known. The levels above what the CPU has are never run.
cpu::PeakProbe find_probe(std::string_view arithmetic, Isa isa) {
  if (arithmetic == "int8_token") arithmetic = "int8";  // the same products, fewer scales
  if (arithmetic != "int8" && arithmetic != "bf16" && arithmetic != "f32") {
    throw InvalidArgument("[peak] arithmetic: expected int8, int8_token, bf16 or f32, got \"" +
                          std::string(arithmetic) + "\"");
  }
  if (isa > cpu_features().best) return nullptr;
  cpu::PeakProbe best = nullptr;
  using enum cpu::Level;
  cpu::for_levels<avx2, avx512, avx512bf16>([&]<cpu::Level kLevel>() {
    if (kLevel == avx512bf16 && !cpu_features().avx512_bf16) return;
    const cpu::PeakProbes& probes = cpu::kernels<kLevel, cpu::PeakProbes>();
    const cpu::PeakProbe probe = arithmetic == "f32"    ? probes.f32
                                 : arithmetic == "int8" ? probes.int8
                                                        : probes.bf16;
    // Of bytes and bfloat16 the next level multiplies more at once.
    const bool fits = isa_of(kLevel) == isa || (arithmetic == "f32" && isa_of(kLevel) < isa);
    if (fits && probe != nullptr) best = probe;
  });
  return best;
}

}  // namespace

// The rates of the threads are of their own CPU time and added up, so that another process on the
// machine lowers them little.
double measure_peak_ops(ThreadPool& pool, std::string_view arithmetic, Isa isa) {
  const cpu::PeakProbe probe = find_probe(arithmetic, isa);
  if (probe == nullptr) return 0;
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    std::vector<double> rates(static_cast<size_t>(pool.size()));
    pool.parallel([&](Team& team) {
      const double start = thread_seconds();
      const auto ops = static_cast<double>(probe(kRounds));
      rates[static_cast<size_t>(team.rank())] = ops / (thread_seconds() - start);
    });
    best = std::max(best, std::accumulate(rates.begin(), rates.end(), 0.0));
  }
  return best;
}

}  // namespace effinfer
