#include "effinfer/placement.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <iterator>

#include "effinfer/error.h"

namespace effinfer {
namespace {

std::string listed(const std::vector<int>& cores) {
  std::string text;
  for (size_t i = 0; i < cores.size();) {
    size_t last = i;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += std::to_string(cores[i]);
    if (last > i) text.append("-").append(std::to_string(cores[last]));
    i = last + 1;
  }
  return text;
}

// Takes a number off the front of a text; false: there is none.
bool take_number(std::string_view& text, int& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

// "0-3,6"; none: it is no such list.
std::vector<int> parse_cores(std::string_view text) {
  std::vector<int> cores;
  while (true) {
    int first = 0;
    if (!take_number(text, first)) return {};
    int last = first;
    if (text.starts_with("-")) {
      text.remove_prefix(1);
      if (!take_number(text, last) || last < first) return {};
    }
    if (last >= CPU_SETSIZE) last = std::max(first, CPU_SETSIZE);  // refused as what is not there
    for (int core = first; core <= last; ++core) cores.push_back(core);
    if (text.empty()) break;
    if (!text.starts_with(",")) return {};
    text.remove_prefix(1);
  }
  std::sort(cores.begin(), cores.end());
  cores.erase(std::unique(cores.begin(), cores.end()), cores.end());
  return cores;
}

bool is_unpinned(const Placement& placement) {
  return placement.device.kind == DeviceKind::cpu && placement.cores.empty();
}

[[noreturn]] void refuse_pair(const std::string& what, const Placement& a, const Placement& b) {
  throw InvalidArgument(
      "[device] cores: expected sets that have none in common, such as \"cpu:0\" "
      "and \"cpu:1\", got \"" +
      name(a) + "\" and \"" + name(b) + "\"" + what);
}

}  // namespace

std::vector<int> usable_cores() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(static_cast<size_t>(core), &mask)) cores.push_back(core);
  }
  return cores;
}

Placement parse_placement(std::string_view text, std::string_view argument) {
  if (!text.starts_with("cpu:")) return {parse_device(text, argument), {}};
  const std::string got = ", got \"" + std::string(text) + "\"";
  const std::vector<int> cores = parse_cores(text.substr(4));
  if (cores.empty()) {
    throw InvalidArgument(std::string(argument) +
                          ": expected cores as in \"cpu:1\", \"cpu:0-3\" or \"cpu:0,2-3\"" + got);
  }
  const std::vector<int> usable = usable_cores();
  const long machine = sysconf(_SC_NPROCESSORS_CONF);
  for (const int core : cores) {
    if (std::binary_search(usable.begin(), usable.end(), core)) continue;
    const std::string why = core >= machine
                                ? "; the machine has " + std::to_string(machine)
                                : "; core " + std::to_string(core) + " is not this process's";
    throw InvalidArgument(std::string(argument) + ": expected cores of " + listed(usable) + got +
                          why);
  }
  return {Device{}, cores};
}

std::string name(const Placement& placement) {
  std::string text = name(placement.device);
  if (!placement.cores.empty()) text.append(":").append(listed(placement.cores));
  return text;
}

std::vector<Placement> place_apart(std::vector<Placement> placements) {
  std::vector<int> taken;
  Placement* unpinned = nullptr;
  for (size_t i = 0; i < placements.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      std::vector<int> shared;
      std::set_intersection(placements[i].cores.begin(), placements[i].cores.end(),
                            placements[j].cores.begin(), placements[j].cores.end(),
                            std::back_inserter(shared));
      if (!shared.empty() || (is_unpinned(placements[i]) && is_unpinned(placements[j]))) {
        refuse_pair("", placements[j], placements[i]);
      }
    }
    taken.insert(taken.end(), placements[i].cores.begin(), placements[i].cores.end());
    if (is_unpinned(placements[i])) unpinned = &placements[i];
  }
  if (unpinned == nullptr || taken.empty()) return placements;
  std::sort(taken.begin(), taken.end());
  const std::vector<int> usable = usable_cores();
  std::vector<int> rest;
  std::set_difference(usable.begin(), usable.end(), taken.begin(), taken.end(),
                      std::back_inserter(rest));
  if (rest.empty()) {
    const auto other = std::find_if(placements.begin(), placements.end(),
                                    [](const Placement& p) { return !p.cores.empty(); });
    refuse_pair(", which leaves no core", *unpinned, *other);
  }
  unpinned->cores = rest;
  return placements;
}

}  // namespace effinfer
