#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "effinfer/error.h"
#include "effinfer/profile.h"

namespace effinfer {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{1} << 20;  // claimed one by one, so that no thread waits for long
// A window is timed as a whole, a millisecond or so: often without an interruption.
constexpr size_t kWindow = size_t{32} << 20;
constexpr int kMaxPasses = 16;
constexpr size_t kAhead = 8192 / sizeof(uint64_t);
constexpr auto kPatience =
    std::chrono::seconds(2);  // no new pass after it: other programs are busy

using Clock = std::chrono::steady_clock;

// The buffer is so large that nothing of a window is left in the caches when its turn comes again.
size_t buffer_bytes() {
  size_t bytes = size_t{256} << 20;
#ifdef _SC_LEVEL3_CACHE_SIZE
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (cache > 0) bytes = std::max(bytes, 4 * static_cast<size_t>(cache));
#endif
  return std::min((bytes + kWindow - 1) / kWindow * kWindow, size_t{2} << 30);
}

// Independent sums keep enough loads in flight; the compiler makes vectors of them. With `ahead`,
// which is in words, lines are asked for before: some machines deliver half as much again then.
uint64_t sum(const uint64_t* data, size_t count, size_t ahead) {
  constexpr size_t kLine = 64 / sizeof(uint64_t);
  uint64_t totals[64] = {};
  for (size_t i = 0; i + 64 <= count; i += 64) {
    if (ahead > 0) {
      for (size_t j = 0; j < 64; j += kLine) __builtin_prefetch(data + i + ahead + j, 0, 2);
    }
    for (size_t j = 0; j < 64; ++j) totals[j] += data[i + j];
  }
  uint64_t result = 0;
  for (const uint64_t total : totals) result += total;
  return result;
}

}  // namespace

double measure_read_bandwidth(ThreadPool& pool) {
  const size_t bytes = buffer_bytes();
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(kHugePage, bytes),
                                                      std::free);
  if (!memory) {
    throw OutOfMemory("[bandwidth] no memory for a buffer of " + std::to_string(bytes) + " bytes");
  }
  madvise(memory.get(), bytes, MADV_HUGEPAGE);
  auto* data = static_cast<uint64_t*>(memory.get());
  constexpr size_t kWords = kChunk / sizeof(uint64_t);
  pool.parallel([&](Team& team) {
    team.for_chunks(static_cast<int64_t>(bytes / kChunk), [&](int64_t chunk) {
      std::fill_n(data + static_cast<size_t>(chunk) * kWords, kWords, uint64_t{1});
    });
  });
  std::atomic<uint64_t> total{0};
  double best = 0;
  const Clock::time_point deadline = Clock::now() + kPatience;
  uint64_t passes = 0;
  for (; passes < 2 || (passes < kMaxPasses && Clock::now() < deadline); ++passes) {
    const size_t ahead = passes % 2 == 0 ? 0 : kAhead;
    for (size_t window = 0; window < bytes; window += kWindow) {
      const uint64_t* first = data + window / sizeof(uint64_t);
      const Clock::time_point start = Clock::now();
      pool.parallel([&](Team& team) {
        uint64_t own = 0;
        team.for_chunks(static_cast<int64_t>(kWindow / kChunk), [&](int64_t chunk) {
          own += sum(first + static_cast<size_t>(chunk) * kWords, kWords, ahead);
        });
        total += own;
      });
      const std::chrono::duration<double> elapsed = Clock::now() - start;
      best = std::max(best, static_cast<double>(kWindow) / elapsed.count());
    }
  }
  // What was summed is used: the loops cannot be dropped.
  if (total != passes * bytes / sizeof(uint64_t)) throw InternalError("[bandwidth] wrong sum");
  return best;
}

}  // namespace effinfer
