// Asynchronous copies. As fiber.cpp, never built with -fsanitize=thread.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "gpu/block.h"
#include "gpu/fiber.h"
#include "gpu/host_tensor_map.h"
#include "gpu/host_unit.h"
#include "gpu/swizzle.h"

namespace effinfer::cuda::host {

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

void Unit::copy_async_if(bool does, void* to, const void* from) {
  if (does) return copy_async(to, from);
  const Machine machine(*owner_, owner_->thread(*this).progress);
  if (owner_->observer() != nullptr) {
    owner_->observer()->skips_copy(owner_->thread(*this).progress);
  }
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

// Begins a copy whose pieces are known. Until it lands, the destination is NaN.
static void begin_copy(Block& block, const Unit& unit, Mbarrier& barrier, BulkCopy copy,
                       const char* what) {
  for (const BulkCopy::Piece& piece : copy.pieces) {
    if (piece.from != nullptr) tell_read(piece.from, piece.bytes);
    tell_write(piece.to, piece.bytes);
  }
  const Progress& progress = block.thread(unit).progress;
  const Machine machine(block, progress);
  const auto found = block.hopper().barriers.find(&barrier);
  if (found == block.hopper().barriers.end() || !block.knows(unit, found->second.made)) {
    throw std::logic_error(std::string(what) + ": expected a barrier after barrier_init");
  }
  if (!found->second.for_copies) {
    throw std::logic_error(std::string(what) + ": no fence_async since barrier_init");
  }
  copy.barrier = &found->second;
  order_before(copy.barrier);
  if (const Progress& now = progress; now.clock != nullptr) {
    copy.clock = block.clock_of(unit);
  }
  for (const BulkCopy::Piece& piece : copy.pieces) {
    copy.bytes += static_cast<int64_t>(piece.bytes);
    if (block.observer() != nullptr) {
      if (piece.from != nullptr) block.observer()->reads(progress, piece.from, piece.bytes);
      block.observer()->begins_bulk(progress, piece.to, piece.bytes);
    }
    std::memset(piece.to, 0xff, piece.bytes);
  }
  block.hopper().copies.push_back(std::move(copy));
}

void Block::land(BulkCopy copy) {
  const Unseen unseen;
  MbarrierState& barrier = *copy.barrier;
  clocks_.acquire(barrier.agent, copy.clock);
  Progress agent;
  agent.thread = static_cast<int>(barrier.agent);
  agent.clock = clocks_.of(barrier.agent);
  agent.epoch = clocks_.epoch(barrier.agent);
  auto* const start = static_cast<unsigned char*>(shared_);
  for (const BulkCopy::Piece& piece : copy.pieces) {
    if (observer_ != nullptr) observer_->ends_copy(agent, piece.to, piece.bytes);
    if (piece.from != nullptr) {
      std::memcpy(piece.to, piece.from, piece.bytes);
    } else {
      std::memset(piece.to, 0, piece.bytes);
    }
    if (hopper_.view.empty()) continue;
    std::memcpy(hopper_.view.data() + (static_cast<unsigned char*>(piece.to) - start), piece.to,
                piece.bytes);
  }
  clocks_.release_own(barrier.agent, barrier.arriving);
  barrier.bytes -= copy.bytes;
  complete(barrier);
}

// A box of a matrix, to be swizzled. Numbers beyond the ends of the matrix are zeros.
static std::vector<BulkCopy::Piece> pieces_of(const TileSource& source, char* to, int col,
                                              int row) {
  std::vector<BulkCopy::Piece> pieces;
  for (int r = 0; r < source.box_rows; ++r) {
    for (int c = 0; c < source.box_cols; c += 8) {
      const auto offset = static_cast<size_t>(r * source.box_cols + c) * 2;
      char* const place = to + swizzled(offset, source.swizzle);
      const int64_t at = int64_t{row} + r;
      const int64_t inside = std::clamp<int64_t>(source.cols - col - c, 0, 8);
      const bool valid = at >= 0 && at < source.rows && col + c >= 0 && inside > 0;
      const char* from =
          static_cast<const char*>(source.data) + at * source.row_bytes + (int64_t{col} + c) * 2;
      const auto there = valid ? static_cast<size_t>(inside) * 2 : 0;
      if (there > 0) pieces.push_back({place, from, there});
      if (there < 16) pieces.push_back({place + there, nullptr, 16 - there});
    }
  }
  return pieces;
}

void Unit::copy_bulk(void* to, const void* from, int bytes, Mbarrier& barrier) {
  require_hopper("copy_bulk");
  require(bytes > 0 && bytes % 16 == 0, "copy_bulk", "expected a multiple of 16 bytes");
  const auto size = static_cast<size_t>(bytes);
  require_aligned(to, 16, "copy_bulk");
  require(in_shared(to) && in_shared(static_cast<char*>(to) + size - 1), "copy_bulk",
          "expected an address in shared memory");
  require_global(from, 16, "copy_bulk");
  BulkCopy copy;
  {
    const Machine machine(*owner_, owner_->thread(*this).progress);
    copy.pieces.push_back({to, from, size});
  }
  begin_copy(*owner_, *this, barrier, std::move(copy), "copy_bulk");
}

void Unit::copy_tile(void* to, const TensorMap& map, int col, int row, Mbarrier& barrier) {
  require_hopper("copy_tile");
  require(reinterpret_cast<uintptr_t>(&map) % 64 == 0, "copy_tile",
          "expected a map at a multiple of 64 bytes");
  const HostTensorMap box = decoded(map);
  const auto row_bytes = static_cast<size_t>(box.source.box_cols) * 2;
  const size_t bytes = row_bytes * static_cast<size_t>(box.source.box_rows);
  const auto* const first = static_cast<const char*>(to);
  const int alignment = box.source.swizzle == Swizzle::none ? 128 : 1024;
  require((first - shared_) % alignment == 0, "copy_tile",
          "expected an address at multiples of 1024 bytes, of 128 where nothing is swizzled");
  require(in_shared(to) && in_shared(first + bytes - 1), "copy_tile",
          "expected an address in shared memory");
  BulkCopy copy;
  {
    const Machine machine(*owner_, owner_->thread(*this).progress);
    copy.pieces = pieces_of(box.source, static_cast<char*>(to), col, row);
  }
  begin_copy(*owner_, *this, barrier, std::move(copy), "copy_tile");
}

}  // namespace effinfer::cuda::host
