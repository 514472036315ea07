#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "effinfer/error.h"
#include "effinfer/profile.h"

namespace effinfer {
namespace {

constexpr size_t kBytes = size_t{256} << 20;  // eight times a large cache
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{1} << 20;  // claimed one by one, so that no thread waits for long
constexpr int kRepeats = 9;

// Independent sums keep enough loads in flight; the compiler makes vectors of them.
uint64_t sum(const uint64_t* data, size_t count) {
  uint64_t totals[64] = {};
  for (size_t i = 0; i + 64 <= count; i += 64) {
    for (size_t j = 0; j < 64; ++j) totals[j] += data[i + j];
  }
  uint64_t result = 0;
  for (const uint64_t total : totals) result += total;
  return result;
}

}  // namespace

double measure_read_bandwidth(ThreadPool& pool) {
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(kHugePage, kBytes),
                                                      std::free);
  if (!memory) throw OutOfMemory("[bandwidth] no memory for a buffer of 256 MiB");
  madvise(memory.get(), kBytes, MADV_HUGEPAGE);
  auto* data = static_cast<uint64_t*>(memory.get());
  const size_t words = kChunk / sizeof(uint64_t);
  const auto chunks = static_cast<int64_t>(kBytes / kChunk);
  pool.parallel([&](Team& team) {
    team.for_chunks(chunks, [&](int64_t chunk) {
      std::fill_n(data + static_cast<size_t>(chunk) * words, words, uint64_t{1});
    });
  });
  std::atomic<uint64_t> total{0};
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel([&](Team& team) {
      uint64_t own = 0;
      team.for_chunks(chunks, [&](int64_t chunk) {
        own += sum(data + static_cast<size_t>(chunk) * words, words);
      });
      total += own;
    });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(kBytes) / elapsed.count());
  }
  // What was summed is used: the loops cannot be dropped.
  if (total != kRepeats * kBytes / sizeof(uint64_t)) throw InternalError("[bandwidth] wrong sum");
  return best;
}

}  // namespace effinfer
