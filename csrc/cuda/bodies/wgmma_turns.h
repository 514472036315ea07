// Two warpgroups that multiply in turn: while one has the tensor cores, the other one makes weights
// of its scores. A turn begins with a barrier of its warpgroup; beyond that no result depends on
// it. One that has work alone has all turns.
#pragma once

#include "cuda/unit.h"

namespace effinfer::cuda {

class Turns {
 public:
  static constexpr int kFirstBarrier = 1;  // of four named ones
  static constexpr int kThreads = 128;     // of a warpgroup

  // Of warpgroup `group`, 0 or 1, which both have as many turns that they share; 0 begins.
  template <class Unit>
  EFFINFER_DEVICE static void start(Unit& unit, int group) {
    if (group == 1) unit.arrive_some(kFirstBarrier, 2 * kThreads);
  }
  template <class Unit>
  EFFINFER_DEVICE static void take(Unit& unit, int group, bool shares) {
    const int id = kFirstBarrier + group;
    unit.sync_some(shares ? id : id + 2, shares ? 2 * kThreads : kThreads);
  }
  // Nobody takes the turn that warpgroup 1 gives in the end.
  template <class Unit>
  EFFINFER_DEVICE static void give(Unit& unit, int group, bool shares) {
    if (shares) unit.arrive_some(kFirstBarrier + (group ^ 1), 2 * kThreads);
  }
};

}  // namespace effinfer::cuda
