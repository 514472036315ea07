// Reads a buffer far larger than the caches with every thread and prints the best rate in bytes
// per second: the bound of decoding, which reads each weight once a token.
//
// usage: bandwidth THREADS [MEGABYTES]
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

namespace {

// Independent sums keep enough loads in flight; the compiler makes vectors of them. With `ahead`,
// which is in words, lines are asked for before: some machines deliver half as much again then.
uint64_t sum(const uint64_t* data, size_t count, size_t ahead) {
  uint64_t total[64] = {};
  for (size_t i = 0; i + 64 <= count; i += 64) {
    if (ahead > 0)
      for (size_t j = 0; j < 64; j += 8) __builtin_prefetch(data + i + ahead + j, 0, 2);
    for (size_t j = 0; j < 64; ++j) total[j] += data[i + j];
  }
  uint64_t result = 0;
  for (uint64_t part : total) result += part;
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const size_t megabytes = argc > 2 ? static_cast<size_t>(std::atoi(argv[2])) & ~size_t{1} : 512;
  if (threads < 1 || megabytes < 1) {
    std::fprintf(stderr, "usage: bandwidth THREADS [MEGABYTES]\n");
    return 2;
  }
  const size_t count = (megabytes << 20) / sizeof(uint64_t);
  // Huge pages, so that page walks are not what is measured.
  const size_t alignment = size_t{2} << 20;
  auto* data = static_cast<uint64_t*>(std::aligned_alloc(alignment, count * sizeof(uint64_t)));
  if (data == nullptr) throw std::bad_alloc();
  madvise(data, count * sizeof(uint64_t), MADV_HUGEPAGE);
  for (size_t i = 0; i < count; ++i) data[i] = 1;
  const size_t share = count / static_cast<size_t>(threads);
  std::vector<uint64_t> results(static_cast<size_t>(threads));
  double best = 0;
  for (int repeat = 0; repeat < 16; ++repeat) {
    const size_t ahead = repeat % 2 == 0 ? 0 : 1024;
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> workers;
    for (size_t t = 0; t < results.size(); ++t)
      workers.emplace_back([&, t] { results[t] = sum(data + t * share, share, ahead); });
    for (std::thread& worker : workers) worker.join();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    const double bytes = static_cast<double>(share * results.size() * sizeof(uint64_t));
    if (bytes / elapsed.count() > best) best = bytes / elapsed.count();
  }
  uint64_t check = 0;
  for (uint64_t result : results) check += result;
  std::free(data);
  std::printf("%.0f %llu\n", best, static_cast<unsigned long long>(check));
  return 0;
}
