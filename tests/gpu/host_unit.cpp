// As fiber.cpp, never built with -fsanitize=thread.
#include "gpu/host_unit.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/float16.h"
#include "gpu/fiber.h"
#include "gpu/fragments.h"
#include "gpu/shared_memory.h"
#include "gpu/sites.h"

namespace effinfer::cuda::host {
namespace {

// What threads meet in.
struct Call {
  bool is_warp = false;
  bool orders = false;  // memory
  const char* what = "";
  Where where;

  bool same(const Call& other) const {
    return std::string_view(what) == other.what && where.line() == other.where.line() &&
           where.column() == other.where.column() &&
           std::string_view(where.file_name()) == other.where.file_name();
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

constexpr size_t kCopyBytes = 16;

Sites sites;
Observer& (*observer_of_this_thread)() = nullptr;

}  // namespace

class Block {
 public:
  struct Thread {
    Fiber fiber;
    Unit unit;
    Progress progress;
    bool late = false;  // runs when nobody else can
    bool started = false;
    bool done = false;
    std::vector<Copy> copies;  // that have not landed, of group `groups` where not committed
    int groups = 0;
  };

  Block(const Grid& grid, uint64_t seed, Observer* observer);
  void run(int block, void* shared);
  void meet(Unit& unit, const Call& call, void* operand = nullptr, Unit::Work work = nullptr);
  Thread& thread(const Unit& unit) { return threads_[static_cast<size_t>(unit.thread)]; }
  const Grid& grid() const { return grid_; }
  Observer* observer() const { return observer_; }
  // Whether an atomic_add of the block is over for this thread.
  bool has_added(const Progress& thread) const {
    return thread.has_added || added_syncs_ < thread.syncs;
  }
  // Before its atomic_add.
  void release(Progress& by);

 private:
  static void enter();  // on a fiber's own stack
  void start(int block);
  void draw_policy();
  void make_ready(size_t thread) { ready_[threads_[thread].late ? 1 : 0].push_back(thread); }
  void pass(const Meeting& here, size_t first);
  void schedule();
  std::string waiting() const;

  const Grid& grid_;
  Observer* observer_;
  std::mt19937_64 draw_;
  std::vector<Thread> threads_;
  std::vector<Meeting> warps_;
  Meeting whole_;
  std::array<std::vector<size_t>, 2> ready_;  // those that run first, and the late ones
  Fiber scheduler_ = Fiber::of_thread();
  Thread* current_ = nullptr;
  void* shared_ = nullptr;
  uint32_t added_syncs_ = UINT32_MAX;  // `syncs` of the first thread that added atomically
  std::exception_ptr error_;
  int reported_ = reported_races();

  static thread_local Block* running;
};

thread_local Block* Block::running = nullptr;

namespace {

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

}  // namespace

Block::Block(const Grid& grid, uint64_t seed, Observer* observer)
    : grid_(grid), observer_(observer), draw_(seed), threads_(static_cast<size_t>(grid.threads)) {
  warps_.resize(static_cast<size_t>(grid.threads / kWarp));
}

void Block::enter() {
  Block& block = *running;
  Thread& mine = *block.current_;
  order_after(&block.draw_);
  mine.started = true;
  try {
    // On its own stack, as a thread's registers and the constants of a launch.
    Unit unit = mine.unit;
    alignas(64) char params[Grid::kMostParams];
    std::copy(block.grid_.params.begin(), block.grid_.params.end(), params);
    block.grid_.kernel(unit, params, block.shared_);
    if (!mine.copies.empty() && !sites.ignoring()) {
      throw std::logic_error("copy_async: leaves before its copies have landed");
    }
  } catch (const std::logic_error& error) {
    block.error_ = std::make_exception_ptr(
        std::logic_error("thread " + std::to_string(mine.unit.thread) + ": " + error.what()));
  } catch (...) {
    block.error_ = std::current_exception();
  }
  mine.done = true;
  order_before(&block);
  Fiber::leave(mine.fiber, block.scheduler_);
}

// Any order, one warp as far ahead as it gets, one warp or one thread behind all others, or half
// of the threads.
void Block::draw_policy() {
  const int warp = static_cast<int>(draw_() % warps_.size());
  const int lane = static_cast<int>(draw_() % kWarp);
  const uint64_t policy = draw_() % 5;
  for (Thread& thread : threads_) {
    const bool same_warp = thread.unit.warp == warp;
    thread.late = policy == 1   ? !same_warp
                  : policy == 2 ? same_warp
                  : policy == 3 ? same_warp && thread.unit.lane == lane
                  : policy == 4 ? draw_() % 2 == 0
                                : false;
  }
}

void Block::start(int block) {
  whole_ = {grid_.threads, 0, {}, std::vector<void*>(threads_.size())};
  for (Meeting& warp : warps_) warp = {kWarp, 0, {}, std::vector<void*>(kWarp)};
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
    thread.started = false;
    thread.done = false;
    thread.copies.clear();
    thread.groups = 0;
    thread.fiber.start(&Block::enter);
  }
  added_syncs_ = UINT32_MAX;
  draw_policy();
  for (std::vector<size_t>& ready : ready_) ready.clear();
  for (size_t i = 0; i < threads_.size(); ++i) make_ready(i);
}

std::string Block::waiting() const {
  std::string text = whole_.waiting();
  for (const Meeting& meeting : warps_) text += meeting.waiting();
  return text;
}

void Block::schedule() {
  for (size_t live = threads_.size(); live > 0;) {
    std::vector<size_t>& ready = ready_[ready_[0].empty() ? 1 : 0];
    if (ready.empty()) throw std::logic_error("deadlock:" + waiting() + " the others never come");
    std::swap(ready[draw_() % ready.size()], ready.back());
    current_ = &threads_[ready.back()];
    ready.pop_back();
    if (observer_ != nullptr) observer_->resumes(&current_->progress);
    Fiber::switch_to(scheduler_, current_->fiber);
    if (observer_ != nullptr) {
      observer_->resumes(nullptr);
      const std::string complaint = observer_->complaint();
      if (!complaint.empty()) throw std::logic_error(complaint);
    }
    if (reported_races() != reported_) throw std::logic_error("race: as reported");
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    if (current_->done) --live;
  }
}

void Block::run(int block, void* shared) {
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
void Block::pass(const Meeting& here, size_t first) {
  const size_t count = static_cast<size_t>(here.expected);
  for (size_t i = first; i < first + count; ++i) {
    if (here.call.orders)
      ++(here.call.is_warp ? threads_[i].progress.warp_syncs : threads_[i].progress.syncs);
    make_ready(i);
  }
  if (observer_ != nullptr && here.call.orders && !here.call.is_warp) {
    observer_->passes_sync(threads_[first].progress.syncs, here.call.where);
  }
}

void Block::meet(Unit& unit, const Call& call, void* operand, Unit::Work work) {
  const Machine machine(*this, thread(unit).progress);
  Meeting& here = call.is_warp ? warps_[static_cast<size_t>(unit.warp)] : whole_;
  if (here.arrived > 0 && !here.call.same(call)) {
    throw std::logic_error("divergence: " + call.text() + " meets " + here.call.text());
  }
  if (call.orders) order_before(&here);
  here.call = call;
  here.operands[static_cast<size_t>(call.is_warp ? unit.lane : unit.thread)] = operand;
  if (++here.arrived == here.expected) {
    if (work != nullptr) work(here.operands.data());
    here.arrived = 0;
    pass(here, call.is_warp ? static_cast<size_t>(unit.warp * kWarp) : 0);
  }
  Fiber::switch_to(thread(unit).fiber, scheduler_);
  if (call.orders) order_after(&here);
}

void Block::release(Progress& by) {
  by.has_added = true;
  added_syncs_ = std::min(added_syncs_, by.syncs);
  for (Thread& thread : threads_) {
    Progress& progress = thread.progress;
    if (!progress.has_fenced || (&progress != &by && progress.fence_syncs >= by.syncs)) continue;
    progress.has_fenced = false;
    if (observer_ != nullptr) observer_->releases(progress);
  }
}

void Unit::refuse(const char* what, const char* message) {
  throw std::logic_error(std::string(what) + ": " + message);
}

void Unit::require_shared(const void* pointer, size_t bytes, const char* what) const {
  require_aligned(pointer, bytes, what);
  require(in_shared(pointer) && in_shared(static_cast<const char*>(pointer) + bytes - 1), what,
          "expected an address in shared memory");
}

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

void Unit::tell_load(const void* pointer, size_t bytes) {
  if (owner_->observer() == nullptr) return;
  const Progress& progress = owner_->thread(*this).progress;
  const Machine machine(*owner_, progress);
  owner_->observer()->loads(progress, pointer, bytes);
}

void Unit::count_atomic() {
  Block::Thread& mine = owner_->thread(*this);
  const Machine machine(*owner_, mine.progress);
  owner_->release(mine.progress);
}

void Unit::shuffle(const void* in, void* out, size_t bytes, int from, const char* what,
                   Where where) {
  struct Slot {
    const void* in;
    void* out;
    size_t bytes;
    int from;
  } slot{in, out, bytes, from};
  owner_->meet(*this, {true, false, what, where}, &slot, [](void** all) {
    for (int i = 0; i < kWarp; ++i) {
      const auto* mine = static_cast<Slot*>(all[i]);
      std::memcpy(mine->out, static_cast<Slot*>(all[mine->from & (kWarp - 1)])->in, mine->bytes);
    }
  });
}

uint32_t Unit::ballot(bool value, Where where) {
  struct Slot {
    bool in;
    uint32_t out;
  } slot{value, 0};
  owner_->meet(*this, {true, false, "ballot", where}, &slot, [](void** all) {
    uint32_t bits = 0;
    for (int i = 0; i < kWarp; ++i) {
      bits |= static_cast<uint32_t>(static_cast<Slot*>(all[i])->in) << i;
    }
    for (int i = 0; i < kWarp; ++i) static_cast<Slot*>(all[i])->out = bits;
  });
  return slot.out;
}

// Until it lands, the destination is NaN.
void Unit::copy_async(void* to, const void* from, bool valid) {
  require_shared(to, kCopyBytes, "copy_async");
  require_global(from, 1, "copy_async");
  require_aligned(from, kCopyBytes, "copy_async");
  if (valid) tell_read(from, kCopyBytes);
  tell_write(to, kCopyBytes);
  Block::Thread& mine = owner_->thread(*this);
  const Machine machine(*owner_, mine.progress);
  if (owner_->observer() != nullptr) {
    if (valid) owner_->observer()->reads(mine.progress, from, kCopyBytes);
    owner_->observer()->begins_copy(mine.progress, to, kCopyBytes);
  }
  std::memset(to, 0xff, kCopyBytes);
  mine.copies.push_back({to, from, valid, mine.groups});
}

void Unit::commit(Where where) {
  if (passes("commit", where)) return;
  ++owner_->thread(*this).groups;
}

void Unit::wait_for(int pending, Where where) {
  if (passes("wait", where)) return;
  Block::Thread& mine = owner_->thread(*this);
  const auto lands = [&](const Copy& copy) { return copy.group < mine.groups - pending; };
  for (const Copy& copy : mine.copies) {
    if (lands(copy)) tell_write(copy.to, kCopyBytes);
  }
  const Machine machine(*owner_, mine.progress);
  for (const Copy& copy : mine.copies) {
    if (!lands(copy)) break;
    if (owner_->observer() != nullptr) {
      owner_->observer()->ends_copy(mine.progress, copy.to, kCopyBytes);
    }
    if (copy.valid) {
      std::memcpy(copy.to, copy.from, kCopyBytes);
    } else {
      std::memset(copy.to, 0, kCopyBytes);
    }
  }
  std::erase_if(mine.copies, lands);
}

// Lane i brings row i % 8 of matrix i / 8, and gets elements 2 (i % 4) and the next one of row
// i / 4 of each (PTX ISA, ldmatrix).
void Unit::ldmatrix(uint32_t (&out)[4], const void* row, Where where) {
  constexpr size_t kRowBytes = 16;
  require_shared(row, kRowBytes, "ldmatrix");
  tell_read(row, kRowBytes);
  if (owner_->observer() != nullptr) {
    owner_->observer()->reads(owner_->thread(*this).progress, row, kRowBytes);
  }
  struct Slot {
    const char* row;
    uint32_t* out;
  } slot{static_cast<const char*>(row), out};
  owner_->meet(*this, {true, false, "ldmatrix", where}, &slot, [](void** all) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int i = 0; i < kWarp; ++i) {
        const char* from = static_cast<Slot*>(all[matrix * 8 + i / 4])->row + i % 4 * 4;
        std::memcpy(static_cast<Slot*>(all[i])->out + matrix, from, 4);
      }
    }
  });
}

void Unit::mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where) {
  using Bf16 = Product<float, 2>;
  Bf16::Slot slot{d, a, b};
  owner_->meet(*this, {true, false, "mma", where}, &slot, Bf16::multiply<of_bf16>);
}

void Unit::mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where) {
  using F16 = Product<float, 2>;
  F16::Slot slot{d, a, b};
  owner_->meet(*this, {true, false, "mma_f16", where}, &slot, F16::multiply<host::of_f16>);
}

void Unit::mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where) {
  using S8 = Product<int32_t, 4>;
  S8::Slot slot{d, a, b};
  owner_->meet(*this, {true, false, "mma_s8", where}, &slot, S8::multiply<of_s8>);
}

// Any NaN becomes the one that the instruction gives.
uint32_t Unit::bf16x2(float low, float high) {
  constexpr uint32_t kNan = 0x7fff;
  const auto rounded = [](float x) { return std::isnan(x) ? kNan : uint32_t{f32_to_bf16(x)}; };
  return rounded(low) | rounded(high) << 16;
}

uint32_t Unit::f16x2(float low, float high) {
  return uint32_t{f32_to_f16(low)} | uint32_t{f32_to_f16(high)} << 16;
}

float Unit::of_f16(uint16_t bits) {
  return f16_to_f32(bits);
}

uint32_t Unit::fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto fma = [&](int half) {
    const auto of = [&](uint32_t pair) { return of_bf16(pair >> 16 * half & 0xffff); };
    return std::fma(of(a), of(b), of(c));
  };
  return bf16x2(fma(0), fma(1));
}

uint32_t Unit::permute(uint32_t a, uint32_t b, uint32_t picks) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<uint32_t>(bytes >> 8 * (picks >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return out;
}

void run(const Grid& grid, uint64_t seed) {
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

void set_observer(Observer& (*of_this_thread)()) {
  observer_of_this_thread = of_this_thread;
}

}  // namespace effinfer::cuda::host
