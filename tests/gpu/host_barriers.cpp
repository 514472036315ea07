// Barriers: of blocks, warps, some warps, and Hopper's mbarriers. As fiber.cpp, never built with
// -fsanitize=thread.
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "gpu/block.h"
#include "gpu/fiber.h"
#include "gpu/host_unit.h"

namespace effinfer::cuda::host {
namespace {

MbarrierState& state_of(Block& block, const Mbarrier& barrier, const char* what) {
  const auto found = block.hopper().barriers.find(&barrier);
  if (found == block.hopper().barriers.end()) {
    throw std::logic_error(std::string(what) + ": expected a barrier after barrier_init");
  }
  return found->second;
}

}  // namespace

bool Unit::passes(const char* what, const Where& where) {
  const Machine machine(*owner_, owner_->thread(*this).progress);
  return sites.passes(owner_->grid().name, what, where);
}

void Unit::sync(Where where) {
  if (passes("sync", where)) return;
  owner_->meet(*this, {false, true, "sync", where});
}

void Unit::sync_warp(Where where) {
  if (passes("sync_warp", where)) return;
  owner_->meet(*this, {true, true, "sync_warp", where});
}

// Orders what came before against the next atomic_add of the thread, or of another one of its block
// that has passed a barrier since, and such an atomic_add before against what follows.
void Unit::fence(Where where) {
  if (passes("fence", where)) return;
  Block::Thread& mine = owner_->thread(*this);
  const Machine machine(*owner_, mine.progress);
  ++mine.progress.fences;
  mine.progress.fence_syncs = mine.progress.syncs;
  mine.progress.has_fenced = true;
  if (!owner_->has_added(mine.progress)) return;
  mine.progress.has_acquired = true;
  if (owner_->observer() != nullptr) owner_->observer()->acquires(mine.progress);
}

// Some warps' barrier: the last arrival ends it for those that wait. The first one says how many
// are to come.
static void arrive_at(Block& block, Unit& unit, int id, int threads, const char* what) {
  NamedBarrier& barrier = block.hopper().named[static_cast<size_t>(id)];
  if (barrier.arrived > 0 && barrier.expected != threads) {
    throw std::logic_error(std::string(what) + ": expected " + std::to_string(barrier.expected) +
                           " threads as those before, got " + std::to_string(threads));
  }
  barrier.expected = threads;
  ++barrier.arrived;
  order_before(&barrier);
  block.tell(unit, barrier.clock);
}

static void end_phase(Block& block, NamedBarrier& barrier) {
  barrier.arrived = 0;
  barrier.over = barrier.clock;
  block.wake(barrier.waiters);
}

static void require_named(int id, int threads, const Grid& grid, const char* what) {
  if (id < 1 || id >= Hopper::kNamedBarriers) {
    throw std::logic_error(std::string(what) + ": expected a barrier from 1 to 15");
  }
  if (threads <= 0 || threads % kWarp != 0 || threads > grid.threads) {
    throw std::logic_error(std::string(what) + ": expected whole warps of the block");
  }
}

void Unit::sync_some(int id, int threads, Where where) {
  if (passes("sync_some", where)) return;
  require(owner_->grid().arch != 0, "sync_some", "expected a kernel with kArch = 90");
  require_named(id, threads, owner_->grid(), "sync_some");
  const Machine machine(*owner_, owner_->thread(*this).progress);
  NamedBarrier& barrier = owner_->hopper().named[static_cast<size_t>(id)];
  arrive_at(*owner_, *this, id, threads, "sync_some");
  if (barrier.arrived == threads) {
    end_phase(*owner_, barrier);
  } else {
    owner_->sleep(*this, barrier.waiters, "sync_some", where);
  }
  order_after(&barrier);
  owner_->learn(*this, barrier.over);
}

void Unit::arrive_some(int id, int threads, Where where) {
  if (passes("arrive_some", where)) return;
  require(owner_->grid().arch != 0, "arrive_some", "expected a kernel with kArch = 90");
  require_named(id, threads, owner_->grid(), "arrive_some");
  const Machine machine(*owner_, owner_->thread(*this).progress);
  NamedBarrier& barrier = owner_->hopper().named[static_cast<size_t>(id)];
  arrive_at(*owner_, *this, id, threads, "arrive_some");
  if (barrier.arrived == threads) end_phase(*owner_, barrier);
}

void Unit::require_hopper(const char* what) const {
  require(owner_->grid().arch == 90, what, "expected a kernel with kArch = 90");
}

void Unit::barrier_init(Mbarrier& barrier, int count) {
  require_hopper("barrier_init");
  require_shared(&barrier, sizeof barrier, "barrier_init");
  require(count > 0 && count < 1 << 20, "barrier_init", "expected a count below 2^20");
  tell_write(&barrier, sizeof barrier);
  const Machine machine(*owner_, owner_->thread(*this).progress);
  std::map<const void*, MbarrierState>& all = owner_->hopper().barriers;
  require(all.find(&barrier) == all.end(), "barrier_init", "the barrier is in use");
  require(all.size() < Hopper::kMostBarriers, "barrier_init", "more than the emulator has");
  MbarrierState state;
  state.count = count;
  state.pending = count;
  state.maker = thread;
  state.agent = static_cast<size_t>(owner_->grid().threads) + all.size();
  // Until others have passed a barrier they know nothing of it.
  owner_->tell(*this, state.made);
  all.emplace(&barrier, std::move(state));
}

// By one thread, which may announce bytes before.
void Unit::arrive(Mbarrier& barrier, int bytes, const char* what) {
  require_hopper(what);
  require_shared(&barrier, sizeof barrier, what);
  const Machine machine(*owner_, owner_->thread(*this).progress);
  MbarrierState& state = state_of(*owner_, barrier, what);
  require(owner_->knows(*this, state.made), what, "no barrier since barrier_init");
  require(state.pending > 0, what, "more arrivals than the phase has");
  require(bytes >= 0 && state.bytes + bytes < 1 << 20, what, "expected less than 2^20 bytes");
  order_before(&state);
  owner_->tell(*this, state.arriving);
  state.bytes += bytes;
  --state.pending;
  owner_->complete(state);
}

void Unit::barrier_arrive(Mbarrier& barrier, Where where) {
  if (passes("barrier_arrive", where)) return;
  arrive(barrier, 0, "barrier_arrive");
}

void Unit::barrier_arrive_expect(Mbarrier& barrier, int bytes, Where where) {
  if (passes("barrier_arrive_expect", where)) return;
  arrive(barrier, bytes, "barrier_arrive_expect");
}

// PTX, mbarrier.try_wait.parity: the phase that is under way, or the one before it.
void Unit::barrier_wait(Mbarrier& barrier, int parity, Where where) {
  if (passes("barrier_wait", where)) return;
  require_hopper("barrier_wait");
  require_shared(&barrier, sizeof barrier, "barrier_wait");
  require(parity == 0 || parity == 1, "barrier_wait", "expected a parity");
  const Machine machine(*owner_, owner_->thread(*this).progress);
  MbarrierState& state = state_of(*owner_, barrier, "barrier_wait");
  require(owner_->knows(*this, state.made), "barrier_wait", "no barrier since barrier_init");
  while (state.phases % 2 == static_cast<uint32_t>(parity)) {
    owner_->sleep(*this, state.waiters, "barrier_wait", where);
  }
  order_after(&state);
  owner_->learn(*this, state.over);
}

void Unit::fence_async(Where where) {
  if (passes("fence_async", where)) return;
  require_hopper("fence_async");
  const Progress& progress = owner_->thread(*this).progress;
  const Machine machine(*owner_, progress);
  Hopper& hopper = owner_->hopper();
  if (!hopper.view.empty()) std::memcpy(hopper.view.data(), shared_, shared_bytes_);
  for (auto& [place, state] : hopper.barriers) state.for_copies |= state.maker == thread;
  if (owner_->observer() != nullptr) owner_->observer()->fences_async(progress);
}

// Registers come from those that other warps gave.
void Unit::change_registers(int count, bool more, Where where) {
  const char* const what = more ? "take_registers" : "give_registers";
  require_hopper(what);
  require(count >= 24 && count <= 256 && count % 8 == 0, what,
          "expected a multiple of 8 from 24 to 256");
  require(owner_->grid().min_blocks > 0, what, "expected a kernel with kMinBlocks");
  const auto mine = static_cast<size_t>(warp);
  owner_->meet(*this, {true, false, what, where});
  const Machine machine(*owner_, owner_->thread(*this).progress);
  Hopper& hopper = owner_->hopper();
  int& own = hopper.registers[mine];
  if (more) require(own <= count, what, "has more already");
  if (!more) require(own >= count, what, "has less already");
  if (own == count) return;
  if (!more) {
    hopper.spare_registers += own - count;
    own = count;
    return owner_->wake(hopper.register_waiters);
  }
  while (own < count && hopper.spare_registers < count - own) {
    owner_->sleep(*this, hopper.register_waiters, what, where);
  }
  if (own == count) return;
  hopper.spare_registers -= count - own;
  own = count;
  owner_->wake(hopper.register_waiters);
}

}  // namespace effinfer::cuda::host
