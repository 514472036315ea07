// As fiber.cpp, never built with -fsanitize=thread; memcpy and memset still count as accesses of the
// fiber that runs.
#include "gpu/host_unit.h"

#include <algorithm>
#include <cstdlib>
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

namespace effinfer::cuda::host {
namespace {

// All of a warp or of a block, on their way to a collective.
struct Meeting {
  int expected = 0;
  int arrived = 0;
  const char* what = "";
  std::vector<void*> operands;
};

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

constexpr size_t kCopyBytes = 16;

}  // namespace

class Block {
 public:
  Block(const Grid& grid, uint64_t seed);
  void run(int block, void* shared);
  void meet(Unit& unit, bool is_warp, const char* what, void* operand, Unit::Work work);

  struct Thread {
    Fiber fiber;
    Unit unit;
    bool done = false;
    std::vector<Copy> open;  // not yet committed
    std::vector<std::vector<Copy>> groups;
  };
  Thread& thread(const Unit& unit) { return threads_[static_cast<size_t>(unit.thread)]; }

 private:
  static void enter();  // on a fiber's own stack
  void start(int block);
  void schedule();
  std::string waiting() const;

  const Grid& grid_;
  std::mt19937_64 draw_;
  std::vector<Thread> threads_;
  std::vector<Meeting> warps_;
  Meeting whole_;
  std::vector<size_t> ready_;
  Fiber scheduler_ = Fiber::of_thread();
  Thread* current_ = nullptr;
  void* shared_ = nullptr;
  std::exception_ptr error_;

  static thread_local Block* running;
};

thread_local Block* Block::running = nullptr;

Block::Block(const Grid& grid, uint64_t seed)
    : grid_(grid), draw_(seed), threads_(static_cast<size_t>(grid.threads)) {
  warps_.resize(static_cast<size_t>(grid.threads / kWarp));
}

void Block::enter() {
  Block& block = *running;
  Thread& mine = *block.current_;
  order_after(&block.draw_);
  try {
    block.grid_.kernel(mine.unit, block.shared_);
    if (!mine.open.empty() || !mine.groups.empty()) {
      throw std::logic_error("copy_async: a thread leaves before its copies have landed");
    }
  } catch (...) {
    block.error_ = std::current_exception();
  }
  mine.done = true;
  order_before(&block);
  Fiber::switch_to(mine.fiber, block.scheduler_);
}

void Block::start(int block) {
  whole_ = {grid_.threads, 0, "", std::vector<void*>(threads_.size())};
  for (Meeting& warp : warps_) warp = {kWarp, 0, "", std::vector<void*>(kWarp)};
  ready_.resize(threads_.size());
  std::iota(ready_.begin(), ready_.end(), size_t{0});
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
    thread.done = false;
    thread.open.clear();
    thread.groups.clear();
    thread.fiber.start(&Block::enter);
  }
}

std::string Block::waiting() const {
  std::string text;
  for (const Meeting& meeting : warps_) {
    if (meeting.arrived > 0) text = meeting.what;
  }
  return whole_.arrived > 0 ? whole_.what : text;
}

void Block::schedule() {
  for (size_t live = threads_.size(); live > 0;) {
    if (ready_.empty()) {
      throw std::logic_error("deadlock: some threads wait at " + waiting() +
                             ", which others never reach");
    }
    std::swap(ready_[draw_() % ready_.size()], ready_.back());
    current_ = &threads_[ready_.back()];
    ready_.pop_back();
    Fiber::switch_to(scheduler_, current_->fiber);
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
    throw;
  }
  running = outer;
  order_after(this);  // the launch happens before what follows it
}

void Block::meet(Unit& unit, bool is_warp, const char* what, void* operand, Unit::Work work) {
  Meeting& here = is_warp ? warps_[static_cast<size_t>(unit.warp)] : whole_;
  if (here.arrived > 0 && std::string_view(here.what) != what) {
    throw std::logic_error(std::string("divergence: ") + here.what + " meets " + what);
  }
  order_before(&here);
  here.what = what;
  here.operands[static_cast<size_t>(is_warp ? unit.lane : unit.thread)] = operand;
  if (++here.arrived == here.expected) {
    if (work != nullptr) work(here.operands.data());
    here.arrived = 0;
    const size_t first = is_warp ? static_cast<size_t>(unit.warp * kWarp) : 0;
    for (int i = 0; i < here.expected; ++i) ready_.push_back(first + static_cast<size_t>(i));
  }
  Fiber::switch_to(thread(unit).fiber, scheduler_);
  order_after(&here);
}

void Unit::meet(Group group, const char* what, void* operand, Work work) {
  owner_->meet(*this, group == Group::warp, what, operand, work);
}

void Unit::require_aligned(const void* pointer, size_t alignment, const char* what) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    throw std::logic_error(std::string(what) + ": expected an address that is a multiple of " +
                           std::to_string(alignment));
  }
}

uint32_t Unit::ballot(bool value) {
  struct Slot {
    bool in;
    uint32_t out;
  } slot{value, 0};
  meet(Group::warp, "ballot", &slot, [](void** all) {
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
  require_aligned(to, kCopyBytes, "copy_async");
  require_aligned(from, kCopyBytes, "copy_async");
  if (valid) count_read(from, kCopyBytes);
  count_write(to, kCopyBytes);
  std::memset(to, 0xff, kCopyBytes);
  owner_->thread(*this).open.push_back({to, from, valid});
}

void Unit::commit() {
  Block::Thread& mine = owner_->thread(*this);
  mine.groups.push_back(std::exchange(mine.open, {}));
}

void Unit::wait_for(int pending) {
  std::vector<std::vector<Copy>>& groups = owner_->thread(*this).groups;
  while (static_cast<int>(groups.size()) > pending) {
    for (const Copy& copy : groups.front()) {
      count_write(copy.to, kCopyBytes);
      if (copy.valid) {
        std::memcpy(copy.to, copy.from, kCopyBytes);
      } else {
        std::memset(copy.to, 0, kCopyBytes);
      }
    }
    groups.erase(groups.begin());
  }
}

// Lane i brings row i % 8 of matrix i / 8, and gets elements 2 (i % 4) and the next one of row
// i / 4 of each (PTX ISA, ldmatrix).
void Unit::ldmatrix(uint32_t (&out)[4], const void* row) {
  require_aligned(row, 16, "ldmatrix");
  count_read(row, 16);
  struct Slot {
    const char* row;
    uint32_t* out;
  } slot{static_cast<const char*>(row), out};
  meet(Group::warp, "ldmatrix", &slot, [](void** all) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int i = 0; i < kWarp; ++i) {
        const char* from = static_cast<Slot*>(all[matrix * 8 + i / 4])->row + i % 4 * 4;
        std::memcpy(static_cast<Slot*>(all[i])->out + matrix, from, 4);
      }
    }
  });
}

namespace {

// The matrices of a warp's m16n8 product by PTX's fragments: element e of register r of lane i, of
// A at row i / 4 + 8 (r % 2), of B at column i / 4.
template <class Sum, class Number, int kPerRegister>
struct Product {
  static constexpr int kDepth = 8 * kPerRegister;

  struct Slot {
    Sum* d;
    const uint32_t* a;
    const uint32_t* b;
  };

  template <Sum (*kNumber)(uint32_t)>
  static void multiply(void** all) {
    constexpr int kBits = 32 / kPerRegister;
    constexpr uint32_t kMask = static_cast<uint32_t>((uint64_t{1} << kBits) - 1);
    Sum a[16][kDepth];
    Sum b[kDepth][8];
    for (int i = 0; i < kWarp; ++i) {
      const Slot& slot = *static_cast<Slot*>(all[i]);
      for (int r = 0; r < 4; ++r) {
        for (int e = 0; e < kPerRegister; ++e) {
          const int k = i % 4 * kPerRegister + e;
          a[i / 4 + r % 2 * 8][k + r / 2 * (kDepth / 2)] = kNumber(slot.a[r] >> kBits * e & kMask);
          if (r < 2) b[k + r * (kDepth / 2)][i / 4] = kNumber(slot.b[r] >> kBits * e & kMask);
        }
      }
    }
    for (int i = 0; i < kWarp; ++i) {
      for (int r = 0; r < 4; ++r) {
        Sum& sum = static_cast<Slot*>(all[i])->d[r];
        for (int k = 0; k < kDepth; ++k) sum += a[i / 4 + r / 2 * 8][k] * b[k][i % 4 * 2 + r % 2];
      }
    }
  }
};

float of_bf16(uint32_t bits) {
  return float_of(bits << 16);
}
float of_f16(uint32_t bits) {
  return f16_to_f32(static_cast<uint16_t>(bits));
}
int32_t of_s8(uint32_t bits) {
  return static_cast<int8_t>(bits);
}

}  // namespace

void Unit::mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  using Bf16 = Product<float, uint16_t, 2>;
  Bf16::Slot slot{d, a, b};
  meet(Group::warp, "mma", &slot, Bf16::multiply<of_bf16>);
}

void Unit::mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  using F16 = Product<float, uint16_t, 2>;
  F16::Slot slot{d, a, b};
  meet(Group::warp, "mma_f16", &slot, F16::multiply<of_f16>);
}

void Unit::mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  using S8 = Product<int32_t, int8_t, 4>;
  S8::Slot slot{d, a, b};
  meet(Group::warp, "mma_s8", &slot, S8::multiply<of_s8>);
}

uint32_t Unit::bf16x2(float low, float high) {
  return uint32_t{f32_to_bf16(low)} | uint32_t{f32_to_bf16(high)} << 16;
}

uint32_t Unit::f16x2(float low, float high) {
  return uint32_t{f32_to_f16(low)} | uint32_t{f32_to_f16(high)} << 16;
}

uint32_t Unit::add_bf16x2(uint32_t a, uint32_t b) {
  return bf16x2(float_of(a << 16) + float_of(b << 16),
                float_of(a & 0xffff0000) + float_of(b & 0xffff0000));
}

void run(const Grid& grid, uint64_t seed) {
  std::mt19937_64 draw(seed);
  std::vector<int> order(static_cast<size_t>(grid.blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), draw);
  constexpr size_t kAlignment = 128;
  const size_t bytes = (grid.shared_bytes + kAlignment - 1) / kAlignment * kAlignment;
  Block block(grid, draw());
  for (const int index : order) {
    // Anew for each block, with its exact size: AddressSanitizer sees what leaves it.
    const std::unique_ptr<void, decltype(&std::free)> shared(std::aligned_alloc(kAlignment, bytes),
                                                             std::free);
    std::memset(shared.get(), 0xff, bytes);
    try {
      block.run(index, shared.get());
    } catch (const std::logic_error& error) {
      throw std::logic_error(std::string("[") + grid.name + "] " + error.what());
    }
  }
}

}  // namespace effinfer::cuda::host
