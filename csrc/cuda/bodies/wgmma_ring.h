// What a block of wgmma_matmul.h multiplies, on its way: a ring of stages in shared memory, of 64 k
// each, which four warps fill as far ahead as there is room.
//
//   x         a tile, by a tensor map
//   weights   of each group of 16 rows a superblock as it lies in the packed weight
//   headers   of super formats (ops/packed_weight.h), for 256 k: a ring of its own
#pragma once

#include "cuda/bodies/row_groups.h"
#include "cuda/bodies/tile_block.h"
#include "cuda/bodies/wgmma_weights.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

inline constexpr int kWgmmaWarps = 8;     // that multiply
inline constexpr int kWgmmaFetchers = 4;  // other warps

struct WgmmaParams {
  TensorMap x;  // boxes of 64 k and the kernel's tokens
  TileParams tile;
};

template <ops::PackedFormat kFormat, int kTokens>
struct WgmmaRing {
  static constexpr int kGroups = kWgmmaWarps;  // of 16 rows
  static constexpr int kUnits = kGroups / 2;
  static constexpr int kLanes = kGroups / kWgmmaFetchers;  // of a warp that fetches
  static constexpr int kRowBytes = static_cast<int>(ops::kSuperblock) * 2;
  using Place = GroupPlace<kFormat>;
  struct Stage {
    alignas(1024) uint8_t x[kTokens * kRowBytes];
    uint8_t weights[kGroups][Place::kWeightBytes];
  };
  // As many as a block has room for, beside barriers.
  static constexpr int kRoom = (227 << 10) - (4 << 10);
  static constexpr int kFit = kRoom / static_cast<int>(sizeof(Stage));
  static constexpr int kStages = kFit < 6 ? kFit : 6;
  // Headers are for kHeaderStages superblocks. When the first of them is fetched, those before the
  // last kStages have been read.
  static constexpr int kHeaderStages = static_cast<int>(ops::kHeaderBlock / ops::kSuperblock);
  static constexpr int kHeaders = 3;
  static_assert((kHeaders - 1) * kHeaderStages + 1 >= kStages);
  struct Shared {
    union {
      Stage ring[kStages];
      TileResults<kTokens> results[kUnits];
    };
    alignas(128) uint8_t headers[kHeaders][kGroups][Place::kHeaderBytes];
    Mbarrier full[kStages];
    Mbarrier empty[kStages];
  };
  static_assert(kStages >= 3);

  // Where the ring goes on.
  struct Turn {
    int stage = 0;
    int parity = 0;
    EFFINFER_DEVICE void next() {
      if (++stage < kStages) return;
      stage = 0;
      parity ^= 1;
    }
  };

  // And the ring of headers.
  struct HeaderTurn {
    int index = 0;
    int left = kHeaderStages;
    EFFINFER_DEVICE void next() {
      if (--left > 0) return;
      left = kHeaderStages;
      if (++index == kHeaders) index = 0;
    }
  };

  EFFINFER_DEVICE static TileBlock block_of(const TileParams& p, int block) {
    return tile_block<kUnits, kTokens>(p, block);
  }

  // Of one thread, before a barrier of all.
  template <class Unit>
  EFFINFER_DEVICE static void start(Unit& unit, Shared& shared) {
    EFFINFER_UNROLL
    for (int i = 0; i < kStages; ++i) {
      unit.barrier_init(shared.full[i], 1);
      unit.barrier_init(shared.empty[i], kWgmmaWarps);
    }
    unit.fence_async();
  }

  // A lane has a group; the first of all has the activations, too, and announces what all of them
  // bring: before that the phase does not end, whatever has come. No phase ends without each of
  // them, so that none is missed by one that waits.
  template <class Unit>
  EFFINFER_DEVICE static void fetch(Unit& unit, const WgmmaParams& p, Shared& shared) {
    const int fetcher = unit.warp - kWgmmaWarps;
    const int mine = fetcher * kLanes + unit.lane;
    const TileBlock block = block_of(p.tile, unit.block);
    const uint8_t* header =
        tile_group(p.tile, p.tile.parts[block.part], block.first_unit + mine / 2, mine % 2 * 16);
    const uint8_t* weights = header + p.tile.header_bytes;
    Turn turn;
    HeaderTurn headers;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < p.tile.superblocks; ++i) {
      const bool has_header = Place::kHeaderRows > 0 && headers.left == kHeaderStages;
      unit.barrier_wait(shared.empty[turn.stage], turn.parity ^ 1);
      Mbarrier& full = shared.full[turn.stage];
      Stage& stage = shared.ring[turn.stage];
      if (fetcher == 0 && unit.lane == 0) {
        unit.barrier_arrive_expect(full, kTokens * kRowBytes + kGroups * Place::kWeightBytes +
                                             (has_header ? kGroups * Place::kHeaderBytes : 0));
        unit.copy_tile(stage.x, p.x, i * static_cast<int>(ops::kSuperblock), block.first_token,
                       full);
      }
      unit.copy_bulk(stage.weights[mine], weights, Place::kWeightBytes, full);
      if (has_header) {
        EFFINFER_UNROLL
        for (int row = 0; row < Place::kHeaderRows; ++row) {
          unit.copy_bulk(shared.headers[headers.index][mine] + row * Place::kHeaderRowBytes,
                         header + row * p.tile.header_row_bytes, Place::kHeaderRowBytes, full);
        }
        header += Place::kHeaderRowBytes;
      }
      weights += Place::kWeightBytes;
      turn.next();
      headers.next();
    }
  }
};

}  // namespace effinfer::cuda
