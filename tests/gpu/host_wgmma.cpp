// wgmma: products of four warps that are done when somebody waits for them, and not before. As
// fiber.cpp, never built with -fsanitize=thread.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/float16.h"
#include "gpu/block.h"
#include "gpu/fiber.h"
#include "gpu/fragments.h"
#include "gpu/host_unit.h"
#include "gpu/swizzle.h"

namespace effinfer::cuda::host {
namespace {

constexpr int kDepth = 16;
constexpr int kRows = 16;  // of a warp
constexpr size_t kWindow =
    1024;  // where a block's shared memory starts: the first bytes are CUDA's

// Offset in shared memory of number (row, k) of a tile (PTX ISA, "Matrix Descriptor Format" and the
// canonical layouts of wgmma).
size_t place_of(uint64_t descriptor, bool transposed, int row, int k) {
  const auto field = [&](int bit) { return static_cast<size_t>(descriptor >> bit & 0x3fff) << 4; };
  const auto swizzle = static_cast<Swizzle>(descriptor >> 62);
  const size_t width = swizzled_row_bytes(swizzle);
  const auto r = static_cast<size_t>(row);
  const auto kk = static_cast<size_t>(k);
  size_t offset = 0;
  if (!transposed) {
    offset = r % 8 * width + r / 8 * field(32);
    offset += swizzle == Swizzle::none ? kk / 8 * field(16) + kk % 8 * 2 : kk * 2;
  } else {
    const size_t piece = r / 8;
    offset = kk % 8 * width + r % 8 * 2;
    if (swizzle == Swizzle::none) {
      offset += piece * field(32) + kk / 8 * field(16);
    } else {
      const size_t pieces = width / 16;
      offset += piece % pieces * 16 + piece / pieces * field(16) + kk / 8 * field(32);
    }
  }
  return swizzled(field(0) + offset, swizzle) - kWindow;
}

// A NaN.
constexpr uint16_t kUnknown = 0xffff;

class Tiles {
 public:
  Tiles(Block& block, const char* shared, size_t bytes)
      : block_(block), shared_(reinterpret_cast<const unsigned char*>(shared)), bytes_(bytes) {}

  // Numbers [rows][16].
  std::vector<float> read(uint64_t descriptor, bool transposed, bool is_f16, int first,
                          int rows) const {
    std::vector<float> out(static_cast<size_t>(rows) * kDepth);
    for_pieces(descriptor, transposed, first, rows, [&](int row, int k, size_t at) {
      for (int i = 0; i < kPiece; ++i, at += 2) {
        uint16_t bits;
        std::memcpy(&bits, shared_ + at, sizeof bits);
        if (!block_.is_fenced(at, sizeof bits)) bits = kUnknown;
        const int place = transposed ? (row + i) * kDepth + k : row * kDepth + k + i;
        out[static_cast<size_t>(place)] = is_f16 ? of_f16(bits) : of_bf16(bits);
      }
    });
    return out;
  }
  // Tells observers.
  void tell(const Progress& reader, uint64_t descriptor, bool transposed, int first,
            int rows) const {
    if (block_.observer() == nullptr) return;
    for_pieces(descriptor, transposed, first, rows, [&](int, int, size_t at) {
      block_.observer()->reads_async(reader, shared_ + at, 2 * kPiece);
    });
  }

 private:
  static constexpr int kPiece = 8;  // numbers that lie behind each other, of a row or of a k

  // each(row, k, place) of the first number of each piece.
  template <class F>
  void for_pieces(uint64_t descriptor, bool transposed, int first, int rows, F&& each) const {
    for (int row = 0; row < rows; row += transposed ? kPiece : 1) {
      for (int k = 0; k < kDepth; k += transposed ? 1 : kPiece) {
        const size_t at = place_of(descriptor, transposed, first + row, k);
        if (at >= bytes_ || at + 2 * kPiece > bytes_) {
          throw std::logic_error("wgmma: a tile reaches beyond the block's shared memory");
        }
        each(row, k, at);
      }
    }
  }

  Block& block_;
  const unsigned char* const shared_;
  const size_t bytes_;
};

unsigned char* bytes_of(void* registers) {
  return static_cast<unsigned char*>(registers);
}

constexpr unsigned char kPoison = 0xff;  // NaN

size_t sum_bytes(const Unit::Wgmma& lane) {
  return static_cast<size_t>(lane.sums) * sizeof(float);
}

constexpr size_t kFragmentBytes = 4 * sizeof(uint32_t);

// Registers that a wgmma takes from a lane.
void hold(WgmmaWarp& warp, size_t lane, unsigned char* registers, size_t bytes) {
  auto& held = warp.held[lane];
  if (const auto found = held.find(registers); found != held.end()) {
    ++found->second.uses;
    return;
  }
  const auto fenced = warp.fenced[lane].find(registers);
  if (fenced == warp.fenced[lane].end() || fenced->second.size() != bytes ||
      std::memcmp(fenced->second.data(), registers, bytes) != 0) {
    throw std::logic_error("wgmma: registers were written since the last wgmma_fence of them");
  }
  held[registers] = {{registers, registers + bytes}, 1};
  std::memset(registers, kPoison, bytes);
}

// Gives them back when no wgmma needs them any more, and says whether.
bool give_back(WgmmaWarp& warp, size_t lane, unsigned char* registers) {
  auto& held = warp.held[lane];
  const auto found = held.find(registers);
  if (--found->second.uses > 0) return false;
  std::vector<unsigned char>& value = found->second.value;
  const auto poisoned = [](unsigned char byte) { return byte == kPoison; };
  if (!std::all_of(registers, registers + value.size(), poisoned)) {
    throw std::logic_error("wgmma: its registers were written before wgmma_wait");
  }
  std::memcpy(registers, value.data(), value.size());
  warp.fenced[lane][registers] = std::move(value);
  held.erase(found);
  return true;
}

// The warp's 16 rows of four warps' 64.
void multiply(const WarpWgmma& op, WgmmaWarp& warp, const Tiles& tiles, int warp_of_four) {
  const Unit::Wgmma& first = op.lanes[0];
  const int cols = first.sums * 2;
  std::vector<float> a(kRows * kDepth);
  if (first.a == nullptr) {
    a = tiles.read(first.a_tile, first.transposed_a, first.is_f16, warp_of_four * kRows, kRows);
  } else {
    for (size_t lane = 0; lane < kWarp; ++lane) {
      uint32_t registers[4];
      std::memcpy(registers, warp.held[lane].at(bytes_of(op.lanes[lane].a)).value.data(),
                  sizeof registers);
      for (size_t r = 0; r < 4; ++r) {
        for (size_t e = 0; e < 2; ++e) {
          const uint32_t bits = registers[r] >> 16 * e & 0xffff;
          const size_t row = lane / 4 + r % 2 * 8;
          const size_t k = lane % 4 * 2 + e + r / 2 * 8;
          a[row * kDepth + k] = first.is_f16 ? of_f16(bits) : of_bf16(bits);
        }
      }
    }
  }
  const std::vector<float> columns =
      tiles.read(first.b_tile, first.transposed, first.is_f16, 0, cols);
  const auto width = static_cast<size_t>(cols);
  std::vector<float> b(columns.size());
  for (size_t k = 0; k < kDepth; ++k) {
    for (size_t col = 0; col < width; ++col) b[k * width + col] = columns[col * kDepth + k];
  }
  std::vector<float> sums(kRows * width);
  // each(value, sum) of a lane's numbers.
  const auto for_sums = [&](auto&& each) {
    for (size_t lane = 0; lane < kWarp; ++lane) {
      unsigned char* value = warp.held[lane].at(bytes_of(op.lanes[lane].d)).value.data();
      for (size_t i = 0; i < width / 2; ++i, value += sizeof(float)) {
        const size_t row = lane / 4 + i / 2 % 2 * 8;
        each(value, sums[row * width + i / 4 * 8 + lane % 4 * 2 + i % 2]);
      }
    }
  };
  if (first.adds) {
    for_sums([](const unsigned char* value, float& sum) { std::memcpy(&sum, value, sizeof sum); });
  }
  // All columns of a row at once, each in the order of k.
  for (size_t row = 0; row < kRows; ++row) {
    float* const of_row = sums.data() + row * width;
    for (size_t k = 0; k < kDepth; ++k) {
      const float factor = a[row * kDepth + k];
      for (size_t col = 0; col < width; ++col) of_row[col] += factor * b[k * width + col];
    }
  }
  for_sums([](unsigned char* value, const float& sum) { std::memcpy(value, &sum, sizeof sum); });
}

}  // namespace

uint64_t Unit::descriptor(const void* first, int leading, int stride, Swizzle swizzle) const {
  require_hopper("descriptor");
  require(in_shared(first), "descriptor", "expected an address in shared memory");
  require_aligned(first, 16, "descriptor");
  require(leading >= 0 && stride >= 0 && leading % 16 == 0 && stride % 16 == 0, "descriptor",
          "expected multiples of 16 bytes");
  const auto at = static_cast<size_t>(static_cast<const char*>(first) - shared_) + kWindow;
  return make_descriptor(static_cast<uint32_t>(at), static_cast<uint32_t>(leading),
                         static_cast<uint32_t>(stride), swizzle);
}

// The last lane to come takes the registers of all; the warp's part of the product comes when it
// waits. Reads are told of at both ends of the time in which they may happen.
void Unit::issue(const Wgmma& mine, Where where) {
  require_hopper("wgmma");
  require(mine.sums == 32 || mine.sums == 64, "wgmma", "expected 64 or 128 columns");
  struct Slot {
    Wgmma mine;
    Unit* unit;
    unsigned line;
  } slot{mine, this, where.line()};
  owner_->meet(*this, {true, false, "wgmma", where}, &slot, [](void** all) {
    WarpWgmma op;
    for (size_t i = 0; i < kWarp; ++i) op.lanes[i] = static_cast<Slot*>(all[i])->mine;
    const Slot& first = *static_cast<Slot*>(all[0]);
    first.unit->begin_wgmma(op, first.line);
  });
}

void Unit::begin_wgmma(WarpWgmma& op, unsigned line) {
  const auto index = static_cast<size_t>(warp);
  WgmmaWarp& mine = owner_->hopper().warps[index];
  std::vector<WgmmaCall>& calls = owner_->hopper().calls[index / Hopper::kWarpsOfGroup];
  const Wgmma& first = op.lanes[0];
  const WgmmaCall call{first.a_tile, first.b_tile, first.sums, first.a == nullptr, line};
  if (mine.issued == calls.size()) calls.push_back(call);
  require(calls[mine.issued++] == call, "wgmma", "its four warps do not agree");
  op.group = mine.groups;
  for (size_t i = 0; i < kWarp; ++i) {
    const Wgmma& one = op.lanes[i];
    require(one.a_tile == call.a_tile && one.b_tile == call.b_tile, "wgmma",
            "its lanes do not agree");
    hold(mine, i, bytes_of(one.d), sum_bytes(one));
    if (one.a != nullptr) hold(mine, i, bytes_of(one.a), kFragmentBytes);
  }
  tell_tiles(op);
  mine.under_way.push_back(op);
}

void Unit::tell_tiles(const WarpWgmma& op) const {
  const Tiles tiles(*owner_, shared_, shared_bytes_);
  const Wgmma& first = op.lanes[0];
  const Progress& lane0 = owner_->thread_at(warp * kWarp).progress;
  if (first.a == nullptr) {
    tiles.tell(lane0, first.a_tile, first.transposed_a, warp % Hopper::kWarpsOfGroup * kRows,
               kRows);
  }
  tiles.tell(lane0, first.b_tile, first.transposed, 0, first.sums * 2);
}

void Unit::fence_registers(Where where, std::initializer_list<Named> registers) {
  if (passes("wgmma_fence", where)) return;
  require_hopper("wgmma_fence");
  owner_->meet(*this, {true, false, "wgmma_fence", where});
  const Machine machine(*owner_, owner_->thread(*this).progress);
  WgmmaWarp& mine = owner_->hopper().warps[static_cast<size_t>(warp)];
  const auto l = static_cast<size_t>(lane);
  for (const Named& one : registers) {
    mine.fenced[l][one.bytes.data()].assign(one.bytes.begin(), one.bytes.end());
  }
}

void Unit::wgmma_commit(Where where) {
  if (passes("wgmma_commit", where)) return;
  require_hopper("wgmma_commit");
  owner_->meet(*this, {true, false, "wgmma_commit", where}, this, [](void** all) {
    const Unit& unit = *static_cast<Unit*>(all[0]);
    ++unit.owner_->hopper().warps[static_cast<size_t>(unit.warp)].groups;
  });
}

void Unit::wait_for_wgmma(int pending, Where where, std::initializer_list<Named> registers) {
  if (passes("wgmma_wait", where)) return;
  require_hopper("wgmma_wait");
  struct Slot {
    Unit* unit;
    NamedRegisters named;
    int pending;
  } slot{this, {}, pending};
  require(registers.size() <= slot.named.size(), "wgmma_wait", "expected fewer registers");
  std::transform(registers.begin(), registers.end(), slot.named.begin(),
                 [](const Named& one) { return one.bytes.data(); });
  owner_->meet(*this, {true, false, "wgmma_wait", where}, &slot, [](void** all) {
    std::array<const NamedRegisters*, kWarp> named;
    for (size_t i = 0; i < kWarp; ++i) named[i] = &static_cast<Slot*>(all[i])->named;
    const Slot& first = *static_cast<Slot*>(all[0]);
    first.unit->end_wgmma(first.pending, named);
  });
}

// All but the `pending` newest groups of the warp.
void Unit::end_wgmma(int pending, const std::array<const NamedRegisters*, kWarp>& named) {
  WgmmaWarp& mine = owner_->hopper().warps[static_cast<size_t>(warp)];
  const Tiles tiles(*owner_, shared_, shared_bytes_);
  const int done = mine.groups - pending;
  size_t count = 0;
  for (; count < mine.under_way.size() && mine.under_way[count].group < done; ++count) {
    const WarpWgmma& op = mine.under_way[count];
    tell_tiles(op);
    multiply(op, mine, tiles, warp % Hopper::kWarpsOfGroup);
    for (size_t i = 0; i < kWarp; ++i) {
      unsigned char* const d = bytes_of(op.lanes[i].d);
      if (give_back(mine, i, d)) {
        require(std::find(named[i]->begin(), named[i]->end(), d) != named[i]->end(), "wgmma_wait",
                "expected the sums that are done among its registers");
      }
      if (op.lanes[i].a != nullptr) give_back(mine, i, bytes_of(op.lanes[i].a));
    }
  }
  mine.under_way.erase(mine.under_way.begin(),
                       mine.under_way.begin() + static_cast<std::ptrdiff_t>(count));
}

}  // namespace effinfer::cuda::host
