// A member's way through the calls of a step, inside its parallel region.
#pragma once

#include <cstddef>
#include <span>

#include "executor/call.h"

namespace effinfer::executor {

// A step and the calls that it needs. In a small step members have arenas of their own.
struct Region {
  const Step& step;
  std::span<const Call* const> calls;
  std::byte* own = nullptr;  // of member 0; null: not a small step
  size_t own_bytes = 0;      // from one member's to the next

  // Runs the calls on one member. `timer.begin()`, `timer.done()` and `timer.end()` are called
  // before and after each call and after its barrier.
  template <class Timer>
  void run(Team& team, Timer&& timer) const {
    Step mine = step;
    if (own != nullptr) mine.own = own + static_cast<size_t>(team.rank()) * own_bytes;
    for (const Call* call : calls) {
      timer.begin();
      if (own != nullptr && call->every_member) {
        Team alone = team.alone();
        call->run(mine, alone);
        timer.done();
      } else {
        call->run(mine, team);
        timer.done();
        team.barrier();
      }
      timer.end();
    }
  }
};

struct NoTimer {
  void begin() {}
  void done() {}
  void end() {}
};

}  // namespace effinfer::executor
