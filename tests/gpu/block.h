// A block that runs: its fibers, what they wait for and who goes on. For host_*.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gpu/clocks.h"
#include "gpu/draw.h"
#include "gpu/fiber.h"
#include "gpu/hopper.h"
#include "gpu/host_unit.h"
#include "gpu/sites.h"

namespace effinfer::cuda::host {

// What threads meet in.
struct Call {
  bool is_warp = false;
  bool orders = false;  // memory
  const char* what = "";
  Where where;

  bool same(const Call& other) const {
    const auto same_text = [](const char* a, const char* b) {
      return a == b || std::string_view(a) == b;
    };
    return is_copy_of(other) ||
           (where.line() == other.where.line() && where.column() == other.where.column() &&
            same_text(what, other.what) && same_text(where.file_name(), other.where.file_name()));
  }
  // Mostly it is the same call of the same code.
  bool is_copy_of(const Call& other) const {
    return what == other.what && std::memcmp(&where, &other.where, sizeof where) == 0;
  }
  std::string text() const {
    return std::string(what) + " at " + where.file_name() + ":" + std::to_string(where.line());
  }
};

// All of a warp or of a block, on their way to a collective.
struct Meeting {
  int expected = 0;
  int arrived = 0;
  Call call;
  std::vector<void*> operands;

  std::string waiting() const {
    if (arrived == 0) return "";
    std::string text = " ";
    text += std::to_string(arrived) + " of " + std::to_string(expected) + " wait in ";
    return text + call.text() + ";";
  }
};

struct Copy {
  void* to;
  const void* from;
  bool valid;
  int group;
};

inline constexpr size_t kCopyBytes = 16;

inline Sites sites;
inline Observer& (*observer_of_this_thread)() = nullptr;

class Block {
 public:
  struct Thread {
    Fiber fiber;
    Unit unit;
    Progress progress;
    bool late = false;  // runs when nobody else can
    bool started = false;
    bool done = false;
    const char* waits = nullptr;  // for what, while it does, apart from collectives
    Where waits_at;
    std::vector<Copy> copies;  // that have not landed, of group `groups` where not committed
    int groups = 0;
  };

  Block(const Grid& grid, uint64_t seed, Observer* observer);
  void run(int block, void* shared);
  void meet(Unit& unit, const Call& call, void* operand = nullptr, Unit::Work work = nullptr);
  Thread& thread(const Unit& unit) { return thread_at(unit.thread); }
  Thread& thread_at(int index) { return threads_[static_cast<size_t>(index)]; }
  const Grid& grid() const { return grid_; }
  Observer* observer() const { return observer_; }
  // Whether an atomic_add of the block is over for this thread.
  bool has_added(const Progress& thread) const {
    return thread.has_added || added_syncs_ < thread.syncs;
  }
  // Before its atomic_add.
  void release(Progress& by);
  Hopper& hopper() { return hopper_; }
  // Stops a thread until somebody wakes it: one of `waiters`.
  void sleep(Unit& unit, std::vector<size_t>& waiters, const char* what, const Where& where);
  void wake(std::vector<size_t>& waiters);
  // What the thread has done is known to who acquires `to`, if clocks are kept.
  void tell(const Unit& unit, Clock& to);
  void learn(const Unit& unit, const Clock& from);
  bool knows(const Unit& unit, const Clock& of) const;
  const Clock& clock_of(const Unit& unit) const {
    return clocks_.clock(static_cast<size_t>(unit.thread));
  }
  void land(BulkCopy copy);  // host_copies.cpp
  // Bytes of copies have come, or arrivals.
  void complete(MbarrierState& barrier);
  // Whether bytes of shared memory are what they were at the last fence_async, unless somebody
  // watches.
  bool is_fenced(size_t at, size_t bytes) const {
    return hopper_.view.empty() || std::memcmp(hopper_.view.data() + at,
                                               static_cast<const char*>(shared_) + at, bytes) == 0;
  }

 private:
  static void enter();  // on a fiber's own stack
  void start(int block);
  void draw_policy();
  void make_ready(size_t thread) { ready_[threads_[thread].late ? 1 : 0].push_back(thread); }
  // Before others become ready, among whom the next one is to be drawn, too.
  void put_back() {
    if (ahead_ != nullptr)
      make_ready(static_cast<size_t>(std::exchange(ahead_, nullptr)->unit.thread));
  }
  void pass(const Meeting& here, size_t first);
  void show_clock(size_t thread);
  void land_some();
  void leave_hopper();
  void schedule();
  void hand_over(Thread& from);
  Thread* draw_ready();
  Thread* take_ready();
  bool has_trouble() const {
    return (observer_ != nullptr && observer_->has_complaint()) || reported_races() != reported_;
  }
  void fail(std::exception_ptr error);
  std::string waiting() const;

  const Grid& grid_;
  Observer* observer_;
  Draw draw_;
  std::vector<Thread> threads_;
  std::vector<Meeting> warps_;
  Meeting whole_;
  std::array<std::vector<size_t>, 2> ready_;  // those that run first, and the late ones
  Fiber scheduler_ = Fiber::of_thread();
  Thread* current_ = nullptr;
  Thread* ahead_ = nullptr;  // who runs next, if nobody becomes ready before
  size_t window_ = 0;        // of the threads that became ready last, who may be next
  void* shared_ = nullptr;
  uint32_t added_syncs_ = UINT32_MAX;  // `syncs` of the first thread that added atomically
  Clocks clocks_;                      // of Hopper's kernels
  Hopper hopper_;
  uint64_t landing_ = 0;  // bulk copies come at once, at any time, when nothing else can happen
  std::exception_ptr error_;
  int reported_ = reported_races();

  inline static thread_local Block* running = nullptr;
};

// While it lives the emulator works for a thread, whose loads and stores are not the kernel's.
class Machine {
 public:
  Machine(Block& block, const Progress& thread) : observer_(block.observer()), thread_(thread) {
    if (observer_ != nullptr) observer_->resumes(nullptr);
  }
  ~Machine() {
    if (observer_ != nullptr) observer_->resumes(&thread_);
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

 private:
  const Unseen unseen_;
  Observer* observer_;
  const Progress& thread_;
};

inline Block::Block(const Grid& grid, uint64_t seed, Observer* observer)
    : grid_(grid), observer_(observer), draw_(seed), threads_(static_cast<size_t>(grid.threads)) {
  whole_ = {grid.threads, 0, {}, std::vector<void*>(threads_.size())};
  warps_.assign(static_cast<size_t>(grid.threads / kWarp),
                {kWarp, 0, {}, std::vector<void*>(kWarp)});
}

// A thread's exception, on its way to whoever launched.
inline void Block::fail(std::exception_ptr error) {
  order_after(&error_);
  error_ = std::move(error);
  order_before(&error_);
}

inline void Block::enter() {
  Block& block = *running;
  Thread& mine = *block.current_;
  order_after(&block.draw_);
  mine.started = true;
  try {
    // On its own stack, as a thread's registers and the constants of a launch.
    Unit unit = mine.unit;
    alignas(64) char params[Grid::kMostParams];
    std::copy(block.grid_.params.begin(), block.grid_.params.end(), params);
    if (block.observer_ != nullptr) block.observer_->resumes(&mine.progress);
    block.grid_.kernel(unit, params, block.shared_);
    if (!mine.copies.empty() && !sites.ignoring()) {
      throw std::logic_error("copy_async: leaves before its copies have landed");
    }
    if (mine.progress.is_early) {
      throw std::logic_error("wait_for_inputs: leaves before it has called that");
    }
  } catch (const std::logic_error& error) {
    block.fail(std::make_exception_ptr(
        std::logic_error("thread " + std::to_string(mine.unit.thread) + ": " + error.what())));
  } catch (...) {
    block.fail(std::current_exception());
  }
  if (block.observer_ != nullptr) block.observer_->resumes(nullptr);
  mine.done = true;
  order_before(&block);
  Fiber::leave(mine.fiber, block.scheduler_);
}

// Any order, one warp as far ahead as it gets, one warp or one thread behind all others, or half
// of the threads. Mostly whoever has met goes on together, in any order: their stacks are in the
// host's first cache.
inline void Block::draw_policy() {
  const int warp = static_cast<int>(draw_.below(warps_.size()));
  const int lane = static_cast<int>(draw_.below(kWarp));
  const size_t policy = draw_.below(5);
  landing_ = draw_.below(3);
  window_ = draw_.below(4) == 0 ? threads_.size() : kWarp;
  for (Thread& thread : threads_) {
    const bool same_warp = thread.unit.warp == warp;
    thread.late = policy == 1   ? !same_warp
                  : policy == 2 ? same_warp
                  : policy == 3 ? same_warp && thread.unit.lane == lane
                  : policy == 4 ? draw_.below(2) == 0
                                : false;
  }
}

inline void Block::start(int block) {
  whole_.arrived = 0;
  for (Meeting& warp : warps_) warp.arrived = 0;
  for (size_t i = 0; i < threads_.size(); ++i) {
    Thread& thread = threads_[i];
    const int index = static_cast<int>(i);
    thread.unit = Unit{};
    thread.unit.thread = index;
    thread.unit.lane = index % kWarp;
    thread.unit.warp = index / kWarp;
    thread.unit.block = block;
    thread.unit.num_blocks = static_cast<int>(grid_.blocks);
    thread.unit.owner_ = this;
    thread.unit.shared_ = static_cast<const char*>(shared_);
    thread.unit.shared_bytes_ = grid_.shared_bytes;
    thread.progress = {};
    thread.progress.thread = index;
    thread.progress.is_early = grid_.waits_itself;
    thread.started = false;
    thread.done = false;
    thread.copies.clear();
    thread.groups = 0;
    thread.waits = nullptr;
    thread.fiber.start(&Block::enter);
  }
  added_syncs_ = UINT32_MAX;
  if (grid_.arch != 0) {
    clocks_.start(threads_.size() + Hopper::kMostBarriers);
    hopper_.start(grid_, observer_ != nullptr);
    for (size_t i = 0; i < threads_.size(); ++i) show_clock(i);
  }
  draw_policy();
  ahead_ = nullptr;
  for (std::vector<size_t>& ready : ready_) ready.clear();
  for (size_t i = 0; i < threads_.size(); ++i) make_ready(i);
}

inline std::string Block::waiting() const {
  std::string text = whole_.waiting();
  for (const Meeting& meeting : warps_) text += meeting.waiting();
  std::map<std::string, int> others;
  for (const Thread& thread : threads_) {
    if (thread.waits != nullptr) ++others[Call{false, false, thread.waits, thread.waits_at}.text()];
  }
  for (const auto& [what, count] : others) {
    text.append(" ").append(std::to_string(count)).append(" wait in ").append(what).append(";");
  }
  return text;
}

// Bulk copies that are under way come now, or some of them, or as many as let somebody go on.
inline void Block::land_some() {
  constexpr uint64_t kAtOnce = 0;
  constexpr uint64_t kAnyTime = 1;
  std::vector<BulkCopy>& copies = hopper_.copies;
  if (copies.empty()) return;
  const Unseen unseen;
  put_back();
  while (!copies.empty() && ((ready_[0].empty() && ready_[1].empty()) || landing_ == kAtOnce ||
                             (landing_ == kAnyTime && draw_.below(4) == 0))) {
    std::swap(copies[draw_.below(copies.size())], copies.back());
    BulkCopy copy = std::move(copies.back());
    copies.pop_back();
    land(std::move(copy));
  }
}

// One of those that run before others, if anybody is ready.
inline Block::Thread* Block::draw_ready() {
  std::vector<size_t>& ready = ready_[ready_[0].empty() ? 1 : 0];
  if (ready.empty()) return nullptr;
  std::swap(ready[ready.size() - 1 - draw_.below(std::min(ready.size(), window_))], ready.back());
  Thread& drawn = threads_[ready.back()];
  ready.pop_back();
  return &drawn;
}

// Draws the one after it, too, whose stack is in the host's first cache by the time that it runs.
inline Block::Thread* Block::take_ready() {
  Thread* const next = ahead_ != nullptr ? ahead_ : draw_ready();
  if (next == nullptr) return nullptr;
  current_ = next;
  ahead_ = draw_ready();
  if (ahead_ != nullptr) ahead_->fiber.prefetch();
  return next;
}

// Goes back from `from` to the next thread at once, which is half of the switches, unless there is
// something to be decided.
inline void Block::hand_over(Thread& from) {
  Thread* const next = hopper_.copies.empty() && !has_trouble() ? take_ready() : nullptr;
  if (next == &from) return;
  Fiber::switch_to(from.fiber, next != nullptr ? next->fiber : scheduler_);
}

inline void Block::schedule() {
  for (size_t live = threads_.size(); live > 0;) {
    land_some();
    Thread* const next = take_ready();
    if (next == nullptr) throw std::logic_error("deadlock:" + waiting() + " the others never come");
    Fiber::switch_to(scheduler_, next->fiber);
    if (has_trouble()) {
      throw std::logic_error(reported_races() != reported_ ? "race: as reported"
                                                           : observer_->complaint());
    }
    order_after(&error_);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    order_before(&error_);
    if (current_->done) --live;
  }
  leave_hopper();
}

inline void Block::leave_hopper() {
  if (grid_.arch == 0 || sites.ignoring()) return;
  if (!hopper_.copies.empty()) {
    throw std::logic_error("copy_bulk: the block ends before its copies have landed");
  }
  for (size_t warp = 0; warp < hopper_.warps.size(); ++warp) {
    const WgmmaWarp& mine = hopper_.warps[warp];
    if (!mine.under_way.empty()) {
      throw std::logic_error("wgmma: warp " + std::to_string(warp) +
                             " ends before what it has begun");
    }
    if (mine.issued != hopper_.calls[warp / Hopper::kWarpsOfGroup].size()) {
      throw std::logic_error("wgmma: warp " + std::to_string(warp) +
                             " takes no part in one of its four warps");
    }
  }
}

inline void Block::run(int block, void* shared) {
  shared_ = shared;
  Block* const outer = std::exchange(running, this);
  start(block);
  order_before(&draw_);
  try {
    schedule();
  } catch (...) {
    running = outer;
    for (Thread& each : threads_) {
      if (!each.done) each.fiber.give_up(this, each.started);
    }
    order_after(this);
    throw;
  }
  running = outer;
  order_after(this);  // the launch happens before what follows it
}

// All have come: they may go on.
inline void Block::pass(const Meeting& here, size_t first) {
  put_back();
  const size_t count = static_cast<size_t>(here.expected);
  for (size_t i = first; i < first + count; ++i) {
    Progress& progress = threads_[i].progress;
    if (here.call.orders) ++(here.call.is_warp ? progress.warp_syncs : progress.syncs);
    make_ready(i);
  }
  if (here.call.orders && clocks_.on()) {
    Clock all;
    for (size_t i = first; i < first + count; ++i) clocks_.release(i, all);
    for (size_t i = first; i < first + count; ++i) {
      clocks_.acquire(i, all);
      show_clock(i);
    }
  }
  if (observer_ != nullptr && here.call.orders && !here.call.is_warp) {
    observer_->passes_sync(threads_[first].progress.syncs, here.call.where);
  }
}

inline void Block::meet(Unit& unit, const Call& call, void* operand, Unit::Work work) {
  const Machine machine(*this, thread(unit).progress);
  Meeting& here = call.is_warp ? warps_[static_cast<size_t>(unit.warp)] : whole_;
  if (here.arrived > 0 && !here.call.same(call)) {
    throw std::logic_error("divergence: " + call.text() + " meets " + here.call.text());
  }
  if (call.orders) order_before(&here);
  if (here.arrived == 0) here.call = call;
  here.operands[static_cast<size_t>(call.is_warp ? unit.lane : unit.thread)] = operand;
  if (++here.arrived == here.expected) {
    if (work != nullptr) work(here.operands.data());
    here.arrived = 0;
    pass(here, call.is_warp ? static_cast<size_t>(unit.warp * kWarp) : 0);
  }
  hand_over(thread(unit));
  if (call.orders) order_after(&here);
}

inline void Block::show_clock(size_t thread) {
  threads_[thread].progress.clock = clocks_.of(thread);
  threads_[thread].progress.epoch = clocks_.epoch(thread);
}

inline void Block::tell(const Unit& unit, Clock& to) {
  if (!clocks_.on()) return;
  clocks_.release(static_cast<size_t>(unit.thread), to);
  show_clock(static_cast<size_t>(unit.thread));
}

inline void Block::learn(const Unit& unit, const Clock& from) {
  if (!clocks_.on()) return;
  clocks_.acquire(static_cast<size_t>(unit.thread), from);
  show_clock(static_cast<size_t>(unit.thread));
}

inline bool Block::knows(const Unit& unit, const Clock& of) const {
  const Clock& mine = clocks_.clock(static_cast<size_t>(unit.thread));
  return std::equal(of.begin(), of.end(), mine.begin(), std::less_equal<>());
}

inline void Block::sleep(Unit& unit, std::vector<size_t>& waiters, const char* what,
                         const Where& where) {
  Thread& mine = thread(unit);
  waiters.push_back(static_cast<size_t>(unit.thread));
  mine.waits = what;
  mine.waits_at = where;
  hand_over(mine);
  mine.waits = nullptr;
}

inline void Block::wake(std::vector<size_t>& waiters) {
  put_back();
  for (const size_t thread : std::exchange(waiters, {})) make_ready(thread);
}

inline void Block::complete(MbarrierState& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  barrier.over = std::move(barrier.arriving);
  barrier.arriving = barrier.over;
  ++barrier.phases;
  wake(barrier.waiters);
}

inline void Block::release(Progress& by) {
  by.has_added = true;
  added_syncs_ = std::min(added_syncs_, by.syncs);
  for (Thread& thread : threads_) {
    Progress& progress = thread.progress;
    if (!progress.has_fenced || (&progress != &by && progress.fence_syncs >= by.syncs)) continue;
    progress.has_fenced = false;
    if (observer_ != nullptr) observer_->releases(progress);
  }
}

}  // namespace effinfer::cuda::host
