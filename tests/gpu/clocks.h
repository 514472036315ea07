// What has happened before what, where barriers are for some threads only: vector clocks. Epochs of
// an agent (a thread, or the copies of an Mbarrier) end where it tells others of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace effinfer::cuda::host {

// Of each agent, up to which epoch its doings are known; 0: none.
using Clock = std::vector<uint32_t>;

class Clocks {
 public:
  void start(size_t agents) {
    clocks_.resize(agents);
    for (size_t i = 0; i < agents; ++i) {
      clocks_[i].assign(agents, 0);  // where it was in the block before
      clocks_[i][i] = 1;
    }
  }
  bool on() const { return !clocks_.empty(); }

  const Clock& clock(size_t agent) const { return clocks_[agent]; }
  const uint32_t* of(size_t agent) const { return on() ? clocks_[agent].data() : nullptr; }
  uint32_t epoch(size_t agent) const { return on() ? clocks_[agent][agent] : 0; }

  // Who acquires `to` later knows all that the agent has done and knows.
  void release(size_t agent, Clock& to) {
    join(to, clocks_[agent]);
    ++clocks_[agent][agent];
  }
  // Who acquires `to` knows what the agent has done, and not what it knows.
  void release_own(size_t agent, Clock& to) {
    if (to.size() < clocks_.size()) to.resize(clocks_.size());
    to[agent] = clocks_[agent][agent]++;
  }
  void acquire(size_t agent, const Clock& from) { join(clocks_[agent], from); }

 private:
  static void join(Clock& to, const Clock& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
  }
  std::vector<Clock> clocks_;
};

}  // namespace effinfer::cuda::host
