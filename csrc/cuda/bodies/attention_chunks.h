// The chunks of an item in their order, with the passes that a tree's rows need over them, and
// where their pages lie: looked up by the block's first warp while the block multiplies the chunk
// before, so that nobody waits for the page table.
#pragma once

#include <cstdint>

#include "cuda/bodies/seen_words.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kChunkUnits = ops::kChunkUnits;
inline constexpr int kUnitTokens = ops::kUnitTokens;
inline constexpr int kChunkTokens = kChunkUnits * kUnitTokens;
inline constexpr int kChunkBlocks = kChunkTokens / 32;  // of bodies/fragments.h

// A pass over a chunk.
struct ChunkPass {
  int32_t chunk;                // of the sequence; -1: there is none
  int32_t rank;                 // of the rows that it is for
  uint32_t units;               // a bit for each that is visited
  int32_t pages[kChunkUnits];   // of the visited ones
  uint64_t words[kChunkUnits];  // visited tokens
  uint64_t path;                // of a displaced row: what keys are gathered for; else 0
  int32_t queries;              // distance_to() its keys; kSameQueries: as in the pass before
};

// What an item visits.
struct ItemUnits {
  int32_t first;
  int32_t end;
  int32_t sinks;  // units [sinks, first_seen) are not visited
  int32_t first_seen;
  bool all_chunks;        // a partial result is wanted of chunks of which nothing is visited, too
  const uint64_t* words;  // of a list; null: all tokens
  const float* weights;   // keys' logarithms of them; null: each counts once
  const float* firsts;    // and what the first one has beside, by the tile's heads; null: nothing
  int32_t num_heads;
  const int32_t* pages;   // of the sequence
  const uint64_t* paths;  // of the tile's tokens; null: a chain
  int32_t tree_start;
  int32_t num_displaced;
  int32_t first_rank;  // 1 when every row is displaced, else 0
  int32_t last_chunk;
  int32_t key_chunk;  // chunks of 256 tokens in one of AttentionProblem::chunk; 0: there are none
  int32_t own_chunk;  // of those, the tile's
};

// But for lists.
EFFINFER_DEVICE bool is_visited(const ItemUnits& item, int32_t unit) {
  return unit >= item.first && unit < item.end && (unit < item.sinks || unit >= item.first_seen);
}

// Which of their queries the tile's rows multiply with the keys of a chunk: 0 those for their own
// chunk of keys, 1 for the one before it, 2 for older ones.
EFFINFER_DEVICE int distance_to(const ItemUnits& item, int32_t chunk) {
  if (item.key_chunk == 0) return 0;
  const int32_t back = item.own_chunk - chunk / item.key_chunk;
  return back < 2 ? back : 2;
}

inline constexpr int kSameQueries = -1;

// ChunkPass::units of a chunk that is visited whole but for lists.
inline constexpr uint32_t kAllUnits = (1u << kChunkUnits) - 1;

// Steps of a warp: its lanes hold what will be the next pass.
class ChunkWalk {
 public:
  // The item's first pass.
  template <class Unit>
  EFFINFER_DEVICE static ChunkWalk first(Unit& unit, const ItemUnits& item) {
    ChunkWalk walk;
    if (item.first >= item.end) return walk;
    walk.find(unit, item, item.first / kChunkUnits);
    walk.queries_ = distance_to(item, walk.chunk_);
    return walk;
  }
  template <class Unit>
  EFFINFER_DEVICE static ChunkWalk after(Unit& unit, const ItemUnits& item, const ChunkPass& pass) {
    ChunkWalk walk;
    if (pass.rank == kAllRanks || pass.rank == item.num_displaced) {
      walk.find(unit, item, pass.chunk + 1);
      const int queries = distance_to(item, walk.chunk_);
      if (queries != distance_to(item, pass.chunk)) walk.queries_ = queries;
      return walk;
    }
    walk.chunk_ = pass.chunk;
    walk.rank_ = pass.rank + 1;
    walk.units_ = pass.units;
    if (unit.lane < kChunkUnits) {
      walk.page_ = pass.pages[unit.lane];
      walk.word_ = pass.words[unit.lane];
    }
    return walk;
  }

  template <class Unit>
  EFFINFER_DEVICE void store(Unit& unit, const ItemUnits& item, ChunkPass& to) const {
    if (unit.lane < kChunkUnits) {
      to.pages[unit.lane] = page_;
      to.words[unit.lane] = word_;
    }
    if (unit.lane != 0) return;
    to.chunk = chunk_;
    to.rank = rank_;
    to.units = units_;
    to.path = rank_ > 0 ? path_of(item) : 0;
    to.queries = queries_;
  }

 private:
  // Of the displaced token that the rank is of.
  EFFINFER_DEVICE uint64_t path_of(const ItemUnits& item) const {
    const uint64_t* path = item.paths;
    for (int32_t left = rank_;; ++path) {
      left -= is_displaced(*path) ? 1 : 0;
      if (left == 0) return *path;
    }
  }

  // The next chunk from `chunk` on: eight at a time, a lane a unit.
  template <class Unit>
  EFFINFER_DEVICE void find(Unit& unit, const ItemUnits& item, int32_t chunk) {
    for (; chunk <= item.last_chunk; chunk += kWarp / kChunkUnits) {
      const int32_t at = chunk * kChunkUnits + unit.lane;
      const bool inside = is_visited(item, at);
      uint64_t word = inside ? ~uint64_t{0} : 0;
      if (inside && item.words != nullptr) word = unit.load(item.words + at);
      const uint32_t visited = unit.ballot(word != 0);
      if (visited == 0 && !item.all_chunks) continue;
      int32_t skipped = 0;
      if (!item.all_chunks) {
        while ((visited >> skipped * kChunkUnits & 0xf) == 0) ++skipped;
      }
      set(unit, item, chunk + skipped, visited >> skipped * kChunkUnits & 0xf);
      return;
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void set(Unit& unit, const ItemUnits& item, int32_t chunk, uint32_t units) {
    chunk_ = chunk;
    units_ = units;
    const bool in_tree = item.num_displaced > 0 && (chunk + 1) * kChunkTokens > item.tree_start;
    rank_ = in_tree ? item.first_rank : kAllRanks;
    if (unit.lane >= kChunkUnits || (units >> unit.lane & 1) == 0) return;
    const int32_t at = chunk * kChunkUnits + unit.lane;
    page_ = unit.load(item.pages + at);
    word_ = item.words != nullptr ? unit.load(item.words + at) : ~uint64_t{0};
  }

  int32_t chunk_ = -1;
  int32_t queries_ = kSameQueries;
  int32_t rank_ = kAllRanks;
  uint32_t units_ = 0;
  int32_t page_ = 0;  // of unit `lane`
  uint64_t word_ = 0;
};

}  // namespace effinfer::cuda
