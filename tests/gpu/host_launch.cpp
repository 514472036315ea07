// Runs grids. As fiber.cpp, never built with -fsanitize=thread.
#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/block.h"
#include "gpu/host_unit.h"
#include "gpu/shared_memory.h"

namespace effinfer::cuda::host {
namespace {

std::atomic<int> emulated_arch = 80;

}  // namespace

int arch() {
  return emulated_arch;
}

void set_arch(int arch) {
  emulated_arch = arch;
}

void run(const Grid& grid, uint64_t seed) {
  if (grid.arch != 0 && grid.arch != arch()) {
    throw std::logic_error("[" + std::string(grid.name) +
                           "] expected a GPU of compute capability " + std::to_string(grid.arch) +
                           ", this one has " + std::to_string(arch()));
  }
  std::mt19937_64 draw(seed);
  std::vector<int> order(static_cast<size_t>(grid.blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), draw);
  Observer* const observer =
      observer_of_this_thread == nullptr ? nullptr : &observer_of_this_thread();
  if (observer != nullptr) observer->launch_begins(grid);
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
