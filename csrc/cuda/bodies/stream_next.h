// What stream_block.h asks for ahead while it waits for its operand: some of the weights that the
// next matmul reads (ops::NextWeights), from memory that has nothing else to do.
//
// Of each weight every `stride`-th 32 rows, so that when the next matmul runs, those of its blocks
// that read the second cache run beside others that read memory. With GLU these rows are of two of
// its units, which mostly share a block: one that ends early makes room for the next kernel's. The
// bytes of 32 rows are one run, which is cut into chunks: a warp asks for one of them or for none.
//
// Who asks are the launch's first warps, of fewer than half of an H100's multiprocessors. Where all
// ask, each gets an equal part of what memory delivers, and so do the few that read the keys of a
// short context, for which everybody waits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "cuda/unit.h"
#include "ops/matmul.h"

namespace effinfer::cuda {

// Of a weight: the bytes of each 32 rows, a unit, `step` from one to the next.
struct NextUnits {
  const uint8_t* first = nullptr;
  int64_t step = 0;
  int32_t bytes = 0;        // of a unit
  int32_t chunk_bytes = 0;  // of it; its last chunk may have less
  int32_t chunks = 0;       // of all units
};

struct StreamNext {
  int32_t chunks = 0;      // of all weights; 0: nothing is asked for
  int32_t chunk_bits = 0;  // log2 of a unit's
  NextUnits weights[ops::kMaxMatmulParts];
};

inline constexpr int64_t kMostNextWarps = 1024;

// For a launch with so many warps.
inline StreamNext stream_next(const ops::NextWeights& next, int64_t of_launch) {
  const int64_t warps = std::min(of_launch, kMostNextWarps);
  constexpr int64_t kLine = 128;
  constexpr int64_t kLeastChunk = 16 * kLine;
  constexpr int kMostChunkBits = 4;  // of 16 chunks of as many lines or more none is empty
  constexpr int64_t kUnitGroups = 2;
  const auto parts = std::span(next.parts).first(static_cast<size_t>(next.num_parts));
  int64_t bytes = 0;
  int64_t units = 0;
  int64_t least = INT64_MAX;  // bytes of a unit
  for (const ops::PackedWeight& part : parts) {
    bytes += static_cast<int64_t>(part.num_bytes());
    units += part.groups() / kUnitGroups;
    least = std::min(least, kUnitGroups * part.group_bytes);
  }
  if (units == 0 || next.bytes <= 0) return {};
  const int64_t stride =
      std::max((bytes + next.bytes - 1) / next.bytes, (units + warps - 1) / warps);
  StreamNext out;
  const int64_t most = units / stride;
  while (out.chunk_bits < kMostChunkBits && most << (out.chunk_bits + 1) <= warps &&
         least >> (out.chunk_bits + 1) >= kLeastChunk) {
    ++out.chunk_bits;
  }
  NextUnits* weight = out.weights;
  for (const ops::PackedWeight& part : parts) {
    const int64_t unit_bytes = kUnitGroups * part.group_bytes;
    const int64_t lines = (unit_bytes + kLine - 1) / kLine;
    const int64_t chunk_lines = (lines + (1 << out.chunk_bits) - 1) >> out.chunk_bits;
    weight->first = part.data + (stride - 1) * unit_bytes;
    weight->step = stride * unit_bytes;
    weight->bytes = static_cast<int32_t>(unit_bytes);
    weight->chunk_bytes = static_cast<int32_t>(chunk_lines * kLine);
    weight->chunks = static_cast<int32_t>(part.groups() / kUnitGroups / stride << out.chunk_bits);
    out.chunks += (weight++)->chunks;
  }
  return out;
}

// `warp` is the warp's number in the launch.
template <class Unit>
EFFINFER_DEVICE void prefetch_next(Unit& unit, const StreamNext& next, int warp) {
  if (warp >= next.chunks) return;
  int chunk = warp;
  const NextUnits* weight = next.weights;
  while (chunk >= weight->chunks) chunk -= (weight++)->chunks;
  const int begin = (chunk & ((1 << next.chunk_bits) - 1)) * weight->chunk_bytes;
  const int left = weight->bytes - begin;
  unit.prefetch(weight->first + (chunk >> next.chunk_bits) * weight->step + begin,
                left < weight->chunk_bytes ? left : weight->chunk_bytes);
}

}  // namespace effinfer::cuda
