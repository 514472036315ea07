// What the benchmarks of kernels share: options, levels, a clock, and the summary of times.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <string>
#include <vector>

#include "effinfer/device.h"

namespace bench {

// Defaults by name, "--threads" and the like; what the command line gives replaces them.
using Options = std::map<std::string, std::string>;

inline void read_options(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; i += 2) {
    if (options.count(argv[i]) == 0 || i + 1 == argc) {
      std::fprintf(stderr, "unknown option or missing value: %s\n", argv[i]);
      std::exit(2);
    }
    options[argv[i]] = argv[i + 1];
  }
}

// The parts between commas.
inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    parts.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

// The levels named between commas, or all that the machine has.
inline std::vector<effinfer::Isa> levels(const std::string& text) {
  if (text.empty()) return effinfer::available_isas();
  std::vector<effinfer::Isa> isas;
  for (const std::string& name : split(text)) {
    isas.push_back(effinfer::parse_isa(name));
    if (isas.back() <= effinfer::cpu_features().best) continue;
    std::fprintf(stderr, "this CPU lacks %s\n", name.c_str());
    std::exit(2);
  }
  return isas;
}

// A level at which nothing was measured is a failure: its kernels are gone, or refuse everything.
inline void check_measured(effinfer::Isa isa, int rows) {
  if (rows > 0) return;
  std::fprintf(stderr, "no kernel of %s was measured\n", std::string(name(isa)).c_str());
  std::exit(1);
}

// "wall", or "cpu": the calling thread's time, for one thread on a busy machine.
inline clockid_t clock_named(const std::string& name) {
  return name == "cpu" ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
}

// In seconds.
inline double now(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Timing {
  double median;
  double best;
};

inline Timing summary(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[0]};
}

}  // namespace bench
