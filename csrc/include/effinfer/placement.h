// Which part of the machine runs a model: a GPU, all of the CPU, or a set of its cores.
//
//   const Placement target = parse_placement("cpu:0-2");
//   const Placement draft = parse_placement("cpu:3");
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "effinfer/device.h"
#include "effinfer/export.h"
#include "effinfer/threads.h"

namespace effinfer {

struct Placement {
  Device device = {};
  // Of the CPU, ascending: threads are pinned to them. Empty: whatever the process may use.
  std::vector<int> cores;
  bool operator==(const Placement&) const = default;
};

// "cpu", "cpu:1", "cpu:0-3", "cpu:0,2-3", "cuda", "cuda:0" or "auto". Throws InvalidArgument, about
// `argument`, for other texts, for cores that the machine lacks or the process may not use, and
// for devices that this build lacks.
EFFINFER_API Placement parse_placement(std::string_view text,
                                       std::string_view argument = "[device]");
EFFINFER_API std::string name(const Placement& placement);  // "cpu:0-3", "cuda:0"

// The cores that the calling thread may use, ascending.
EFFINFER_API std::vector<int> usable_cores();

// A pool with a member for each of these cores (of the first `threads`; 0: all), pinned to it; so
// is the thread that calls parallel(), while it does. Throws InvalidArgument for no core, for one
// that is named twice, and for one that the process may not use.
EFFINFER_API std::shared_ptr<ThreadPool> pinned_pool(const std::vector<int>& cores,
                                                     int threads = 0);
// The cores on which members of a pool may run, ascending: it asks them. Of a pinned pool those
// that it is pinned to.
EFFINFER_API std::vector<int> cores_of(ThreadPool& pool);

// Placements that are to run at the same time. One "cpu" among sets of cores becomes what these
// leave. Throws InvalidArgument for sets that share a core, for a "cpu" beside another, and where
// nothing is left.
EFFINFER_API std::vector<Placement> place_apart(std::vector<Placement> placements);

}  // namespace effinfer
