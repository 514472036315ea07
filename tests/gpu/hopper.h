// What a block of a Hopper kernel has beyond its threads. For block.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "cuda/unit.h"
#include "gpu/clocks.h"
#include "gpu/host_unit.h"

namespace effinfer::cuda::host {

// An mbarrier: where PTX keeps 64 bits, the emulator keeps this, by its address.
struct MbarrierState {
  int count = 0;            // arrivals of a phase
  int pending = 0;          // that are to come
  int64_t bytes = 0;        // announced and not there; below 0: there and not announced
  uint32_t phases = 0;      // that are over
  int maker = 0;            // the thread that made it
  bool for_copies = false;  // since the maker's fence_async
  size_t agent = 0;         // that its copies are to clocks
  Clock made;               // of barrier_init
  Clock arriving;           // of this phase
  Clock over;               // of all before
  std::vector<size_t> waiters;
};

// A copy on its way, in pieces.
struct BulkCopy {
  struct Piece {
    void* to;
    const void* from;  // null: zeros
    size_t bytes;
  };
  std::vector<Piece> pieces;
  MbarrierState* barrier = nullptr;
  int64_t bytes = 0;
  Clock clock;  // of who began it
};

struct NamedBarrier {
  int expected = 0;
  int arrived = 0;
  Clock clock;
  Clock over;  // as the last phase ended
  std::vector<size_t> waiters;
};

// A wgmma that a warp has issued, with the registers of its lanes.
struct WarpWgmma {
  std::array<Unit::Wgmma, kWarp> lanes;
  int group = 0;
};

// Registers of a lane that are not its own before a wait: what they hold, and of how many wgmmas.
struct Held {
  std::vector<unsigned char> value;
  int uses = 0;
};

struct WgmmaWarp {
  std::vector<WarpWgmma> under_way;
  int groups = 0;  // committed
  size_t issued = 0;
  std::array<std::map<unsigned char*, Held>, kWarp> held;
  // As the last wgmma_fence saw them.
  std::array<std::map<unsigned char*, std::vector<unsigned char>>, kWarp> fenced;
};

// What the warps of four must agree upon.
struct WgmmaCall {
  uint64_t a_tile;
  uint64_t b_tile;
  int sums;
  bool a_in_shared;
  unsigned line;
  bool operator==(const WgmmaCall&) const = default;
};

struct Hopper {
  static constexpr size_t kMostBarriers = 96;
  static constexpr int kNamedBarriers = 16;
  static constexpr int kWarpsOfGroup = 4;

  std::map<const void*, MbarrierState> barriers;
  std::array<NamedBarrier, kNamedBarriers> named;
  std::vector<BulkCopy> copies;
  std::vector<WgmmaWarp> warps;
  std::vector<std::vector<WgmmaCall>> calls;  // of each four warps
  // Shared memory as copies and wgmma see it: what threads wrote up to a fence_async. Empty where
  // somebody watches, who knows of each byte whether it was fenced.
  std::vector<unsigned char> view;
  std::vector<int> registers;  // of a thread of each warp
  int spare_registers = 0;     // of a thread of a warp
  std::vector<size_t> register_waiters;

  void start(const Grid& grid, bool is_watched) {
    const auto num_warps = static_cast<size_t>(grid.threads / kWarp);
    *this = {};
    warps.resize(num_warps);
    calls.resize((num_warps + kWarpsOfGroup - 1) / kWarpsOfGroup);
    if (!is_watched) view.assign(grid.shared_bytes, 0xff);
    constexpr int kRegisters = 65536;
    constexpr int kMost = 248;  // a multiple of 8
    const int each = kRegisters / grid.threads / std::max(1, grid.min_blocks) / 8 * 8;
    registers.assign(num_warps, std::min(each, kMost));
  }
};

}  // namespace effinfer::cuda::host
