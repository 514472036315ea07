// Two warpgroups that multiply in turn: while one has the tensor cores, the other one makes weights
// of its scores. A turn begins with a barrier of its warpgroup; beyond that no result depends on
// it.
#pragma once

#include "cuda/unit.h"

namespace effinfer::cuda {

class Turns {
 public:
  static constexpr int kFirstBarrier = 1;  // of two named ones
  static constexpr int kThreads = 256;

  // Of warpgroup `group`, 0 or 1; 0 begins.
  template <class Unit>
  EFFINFER_DEVICE static void start(Unit& unit, int group) {
    if (group == 1) unit.arrive_some(kFirstBarrier, kThreads);
  }
  template <class Unit>
  EFFINFER_DEVICE static void take(Unit& unit, int group) {
    unit.sync_some(kFirstBarrier + group, kThreads);
  }
  // Nobody waits after the last turn of all.
  template <class Unit>
  EFFINFER_DEVICE static void give(Unit& unit, int group, bool is_last) {
    if (group == 1 && is_last) return;
    unit.arrive_some(kFirstBarrier + (group ^ 1), kThreads);
  }
};

}  // namespace effinfer::cuda
