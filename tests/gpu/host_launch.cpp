// Runs grids. As fiber.cpp, never built with -fsanitize=thread.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpu/block.h"
#include "gpu/host_unit.h"
#include "gpu/shared_memory.h"

namespace effinfer::cuda::host {
namespace {

std::atomic<int> emulated_arch = 80;
std::atomic<int64_t> emulated_shared_bytes = 227 << 10;
std::atomic<int> emulated_multiprocessors = 132;
std::atomic<uint64_t> series = 1;

// Which launches are watched (observer.h): all, or, where a program repeats them by the thousand,
// the first few of each kernel on as many blocks.
class Watch {
 public:
  static constexpr const char* kMost = "EFFINFER_WATCHED_LAUNCHES";

  Watch() {
    const char* most = std::getenv(kMost);
    if (most != nullptr) most_ = std::max(std::atoi(most), 1);
  }
  bool takes(const Grid& grid) {
    if (most_ == 0) return true;
    const std::lock_guard lock(mutex_);
    int& seen = seen_[{reinterpret_cast<uintptr_t>(grid.kernel), grid.blocks}];
    if (seen == most_) return false;
    ++seen;
    return true;
  }

 private:
  int most_ = 0;  // 0: all
  std::mutex mutex_;
  std::map<std::pair<uintptr_t, int64_t>, int> seen_;
};

Watch& watch() {
  static Watch watch;
  return watch;
}

}  // namespace

int arch() {
  return emulated_arch;
}

void set_arch(int arch) {
  emulated_arch = arch;
}

int64_t shared_bytes() {
  return emulated_shared_bytes;
}

void set_shared_bytes(int64_t bytes) {
  emulated_shared_bytes = bytes;
}

int multiprocessors() {
  return emulated_multiprocessors;
}

void set_multiprocessors(int count) {
  emulated_multiprocessors = count;
}

void run(const Grid& grid, uint64_t seed) {
  if (grid.arch != 0 && grid.arch != arch()) {
    throw std::logic_error("[" + std::string(grid.name) +
                           "] expected a GPU of compute capability " + std::to_string(grid.arch) +
                           ", this one has " + std::to_string(arch()));
  }
  if (static_cast<int64_t>(grid.shared_bytes) > shared_bytes()) {
    throw std::logic_error("[" + std::string(grid.name) + "] expected at most " +
                           std::to_string(shared_bytes()) + " bytes of shared memory, got " +
                           std::to_string(grid.shared_bytes));
  }
  std::mt19937_64 draw(seed);
  std::vector<int> order(static_cast<size_t>(grid.blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), draw);
  const bool watched = observer_of_this_thread != nullptr && watch().takes(grid);
  Observer* const observer = watched ? &observer_of_this_thread() : nullptr;
  if (observer != nullptr) observer->launch_begins(grid, series);
  SharedMemory shared(grid.shared_bytes);
  Block block(grid, draw(), observer);
  for (const int index : order) {
    shared.begin_block();
    if (observer != nullptr) observer->block_begins(shared.data(), grid.shared_bytes);
    try {
      block.run(index, shared.data());
      if (observer != nullptr) observer->block_ends();
      shared.end_block();
    } catch (const std::logic_error& error) {
      throw std::logic_error("[" + std::string(grid.name) + "] block " + std::to_string(index) +
                             ": " + error.what());
    }
  }
}

void end_of_grids() {
  ++series;
}

void record_sites() {
  sites.record();
}

std::set<Site> recorded_sites() {
  return sites.recorded();
}

void ignore_site(const Site& site) {
  sites.ignore(site);
}

Races detected_races() {
#if defined(EFFINFER_TSAN)
  return Races::of_block;
#else
  return observer_of_this_thread == nullptr ? Races::none : Races::all;
#endif
}

Banks count_banks(const std::function<void()>& body) {
  if (observer_of_this_thread == nullptr) {
    body();
    return {};
  }
  observer_of_this_thread().count_banks();
  body();
  return observer_of_this_thread().take_banks();
}

void set_observer(Observer& (*of_this_thread)()) {
  observer_of_this_thread = of_this_thread;
}

}  // namespace effinfer::cuda::host
