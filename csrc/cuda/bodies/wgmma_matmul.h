// y = x W^T for many tokens on Hopper: y^T = W x^T by wgmma, with W in registers, unpacked there
// (wgmma_weights.h), and x in shared memory.
//
// A block multiplies kRowTiles x 128 rows with kColumns tokens: two warpgroups, of which each warp
// has kRowTiles groups of 16 rows and all the tokens; and a warp that does nothing but fetch, some
// superblocks ahead: tiles of x by a tensor map, weights as they lie by bulk copies, a group's
// superblock each. Those that multiply spend no instruction on memory but reads of shared memory.
//
//   - 256 rows x 128 tokens are 128 registers of sums;
//   - a superblock of 64 k takes the tensor cores 1024 cycles, while 25 KB (Q4) come through the
//     L2 cache: half of what a tile of 128 x 256 bfloat16 would need.
//
// Each warpgroup unpacks a chunk of 32 k while the products of the one before are under way.
//
// A sum is one chain of products in the order of k: a token's bits do not depend on how many there
// are, nor on what the others hold.
#pragma once

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/bodies/row_groups.h"
#include "cuda/bodies/tile_block.h"
#include "cuda/bodies/wgmma_weights.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

struct WgmmaParams {
  TensorMap x;  // boxes of 64 k and the kernel's tokens
  TileParams tile;
};

template <ops::PackedFormat kFormat, int kRowTiles, int kColumns>
struct WgmmaMatmul {
  static constexpr const char* kName = "wgmma_matmul";
  static constexpr int kWarps = 8;  // that multiply
  static constexpr int kThreads = (kWarps + 4) * kWarp;
  static constexpr int kMinBlocks = 1;
  static constexpr int kArch = 90;
  static constexpr int kTokens = kColumns;
  static constexpr int kGroups = kWarps * kRowTiles;  // of 16 rows
  static constexpr int kUnits = kGroups / 2;
  static constexpr int kProductTokens = 128;
  static constexpr int kTokenTiles = kTokens / kProductTokens;
  static constexpr int kSums = kRowTiles * kTokenTiles;  // products' of a warpgroup
  static constexpr int kChunks = static_cast<int>(ops::kSuperblock) / (16 * kChunkSteps);
  static constexpr int kRowBytes = static_cast<int>(ops::kSuperblock) * 2;
  using Params = WgmmaParams;
  using Weights = WgmmaWeights<kFormat>;
  using Place = GroupPlace<kFormat>;
  struct Stage {
    alignas(1024) uint8_t x[kTokens * kRowBytes];
    uint8_t weights[kGroups][Place::kBytes];
  };
  // As many as a block has room for, beside barriers.
  static constexpr int kRoom = (227 << 10) - 1024;
  static constexpr int kFit = kRoom / static_cast<int>(sizeof(Stage));
  static constexpr int kStages = kFit < 6 ? kFit : 6;
  struct Shared {
    union {
      Stage ring[kStages];
      TileResults<kTokens> results[kUnits];
    };
    Mbarrier full[kStages];
    Mbarrier empty[kStages];
  };
  static_assert(kChunks == 2 && kStages >= 3);

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (unit.thread == 0) {
      EFFINFER_UNROLL
      for (int i = 0; i < kStages; ++i) {
        unit.barrier_init(shared.full[i], 1);
        unit.barrier_init(shared.empty[i], kWarps);
      }
      unit.fence_async();
    }
    unit.sync();
    // 2 x 232 + 40 registers are what three warpgroups of 168 have.
    if (unit.warp >= kWarps) {
      unit.template give_registers<40>();
      if (unit.warp == kWarps) fetch(unit, p, shared);
    } else {
      unit.template take_registers<232>();
      multiply(unit, p, shared);
    }
  }

 private:
  using Sums = float[kSums][kProductTokens / 2];
  using Fragments = ChunkFragments[kRowTiles];

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

  EFFINFER_DEVICE static TileBlock block_of(const TileParams& p, int block) {
    return tile_block<kUnits, kTokens>(p, block);
  }

  // A lane has a group; the first one has the activations, too, and announces what all of them
  // bring: before that the phase does not end, whatever has come.
  template <class Unit>
  EFFINFER_DEVICE static void fetch(Unit& unit, const Params& p, Shared& shared) {
    static_assert(kGroups <= kWarp);
    const TileBlock block = block_of(p.tile, unit.block);
    const uint8_t* const group = tile_group(p.tile, p.tile.parts[block.part],
                                            block.first_unit + unit.lane / 2, unit.lane % 2 * 16);
    const uint8_t* weights = group + p.tile.header_bytes;
    Turn turn;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < p.tile.superblocks; ++i) {
      unit.barrier_wait(shared.empty[turn.stage], turn.parity ^ 1);
      Mbarrier& full = shared.full[turn.stage];
      Stage& stage = shared.ring[turn.stage];
      if (unit.lane == 0) {
        unit.barrier_arrive_expect(full, kTokens * kRowBytes + kGroups * Place::kBytes);
        unit.copy_tile(stage.x, p.x, i * static_cast<int>(ops::kSuperblock), block.first_token,
                       full);
      }
      if (unit.lane < kGroups) {
        uint8_t* const to = stage.weights[unit.lane];
        unit.copy_bulk(to, weights, Place::kWeightBytes, full);
        EFFINFER_UNROLL
        for (int row = 0; row < Place::kHeaderRows; ++row) {
          // A row of the header has a piece for 4 superblocks.
          unit.copy_bulk(to + Place::kWeightBytes + row * Place::kHeaderRowBytes,
                         group + row * p.tile.header_row_bytes + (i >> 2) * Place::kHeaderRowBytes,
                         Place::kHeaderRowBytes, full);
        }
      }
      weights += Place::kWeightBytes;
      turn.next();
    }
  }

  // A warp's groups of a stage, one chunk at a time.
  struct Loaded {
    Weights tiles[kRowTiles];

    template <class Unit>
    EFFINFER_DEVICE void load(const Unit& unit, const Stage& stage, int chunk) {
      EFFINFER_UNROLL
      for (int tile = 0; tile < kRowTiles; ++tile) {
        tiles[tile].load(stage.weights[unit.warp * kRowTiles + tile], unit.lane, chunk);
      }
    }
    template <class Unit>
    EFFINFER_DEVICE void unpack(Unit& unit, int chunk, Fragments& a) const {
      EFFINFER_UNROLL
      for (int tile = 0; tile < kRowTiles; ++tile) {
        tiles[tile].fragments(unit, unit.lane, chunk, a[tile]);
      }
    }
  };

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, Shared& shared) {
    const int superblocks = p.tile.superblocks;
    Sums sums = {};
    Fragments a[kChunks] = {};
    Loaded loaded;
    Turn turn;
    unit.barrier_wait(shared.full[0], 0);
    loaded.load(unit, shared.ring[0], 0);
    loaded.unpack(unit, 0, a[0]);
    fence(unit, sums);
    Mbarrier* done = nullptr;  // of the superblock before
    EFFINFER_NO_UNROLL
    for (int i = 0; i < superblocks; ++i) {
      const Stage& stage = shared.ring[turn.stage];
      const uint64_t x = unit.descriptor(stage.x, 16, 8 * kRowBytes, Swizzle::bytes128);
      Mbarrier* const mine = &shared.empty[turn.stage];
      multiply_chunk(unit, a[0], x, sums);
      loaded.load(unit, stage, 1);
      // Of the chunk before, which was the last of its superblock.
      wait(unit, a[1]);
      unit.sync_warp();  // all have read its weights
      if (done != nullptr && unit.lane == 0) unit.barrier_arrive(*done);
      loaded.unpack(unit, 1, a[1]);
      multiply_chunk(unit, a[1], x + kChunkSteps * 2, sums);
      turn.next();
      done = mine;
      if (i + 1 == superblocks) break;
      unit.barrier_wait(shared.full[turn.stage], turn.parity);
      loaded.load(unit, shared.ring[turn.stage], 0);
      wait(unit, a[0]);
      loaded.unpack(unit, 0, a[0]);
    }
    wait_all(unit, sums);
    unit.sync_some(1, kWarps * kWarp);  // nobody reads the ring any more
    finish(unit, p.tile, sums, shared.results);
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply_chunk(Unit& unit, Fragments& a, uint64_t x, Sums& sums) {
    if constexpr (kRowTiles == 1) {
      unit.wgmma_fence(a[0][0], a[0][1]);
    } else {
      unit.wgmma_fence(a[0][0], a[0][1], a[1][0], a[1][1]);
    }
    EFFINFER_UNROLL
    for (int step = 0; step < kChunkSteps; ++step) {
      EFFINFER_UNROLL
      for (int i = 0; i < kSums; ++i) {
        constexpr int kTile = kProductTokens * kRowBytes / 16;
        unit.wgmma(sums[i], a[i / kTokenTiles][step],
                   x + static_cast<uint64_t>(step * 2 + i % kTokenTiles * kTile));
      }
    }
    unit.wgmma_commit();
  }

  // Until only the newest chunk is under way. Registers of the one before, `a`, are in use until
  // here, which the compiler knows by this alone.
  template <class Unit>
  EFFINFER_DEVICE static void wait(Unit& unit, Fragments& a) {
    if constexpr (kRowTiles == 1) {
      unit.template wgmma_wait<1>(a[0][0], a[0][1]);
    } else {
      unit.template wgmma_wait<1>(a[0][0], a[0][1], a[1][0], a[1][1]);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE static void fence(Unit& unit, Sums& sums) {
    if constexpr (kSums == 1) {
      unit.wgmma_fence(sums[0]);
    } else {
      unit.wgmma_fence(sums[0], sums[1]);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE static void wait_all(Unit& unit, Sums& sums) {
    if constexpr (kSums == 1) {
      unit.template wgmma_wait<0>(sums[0]);
    } else {
      unit.template wgmma_wait<0>(sums[0], sums[1]);
    }
  }

  // Through shared memory: each lane has two rows of tokens 2 t and 2 t + 1 of each eight, and
  // stores are to be of many rows of a token. A unit is of one warp or of two.
  template <class Unit>
  EFFINFER_DEVICE static void finish(Unit& unit, const TileParams& p, const Sums& sums,
                                     TileResults<kTokens> (&all)[kUnits]) {
    static constexpr int kUnitWarps = 2 / kRowTiles;
    const TileBlock block = block_of(p, unit.block);
    const int index = unit.warp / kUnitWarps;
    TileResults<kTokens>& results = all[index];
    EFFINFER_UNROLL
    for (int i = 0; i < kSums; ++i) {
      const int group = unit.warp * kRowTiles % 2 + i / kTokenTiles;
      EFFINFER_UNROLL
      for (int tile = 0; tile < kProductTokens / 8; ++tile) {
        float values[4];
        EFFINFER_UNROLL
        for (int j = 0; j < 4; ++j) values[j] = sums[i][tile * 4 + j];
        results.store_rows(unit, i % kTokenTiles * (kProductTokens / 8) + tile, group, values);
      }
    }
    if constexpr (kUnitWarps == 1) {
      unit.sync_warp();
    } else {
      unit.sync_some(2 + index, kUnitWarps * kWarp);
    }
    const TilePart& part = p.parts[block.part];
    if (block.first_unit + index < part.units) {
      finish_tokens(unit, p, part, block.first_unit + index, block.first_token, block.num_tokens,
                    results, unit.warp % kUnitWarps * kWarp + unit.lane, kUnitWarps * kWarp);
    }
    if (block.first_unit + kUnits >= part.units) {
      pad_operand(unit, p.operand, part.weight.rows, block.first_token,
                  block.first_token + block.num_tokens, unit.thread, kWarps * kWarp);
    }
  }
};

}  // namespace effinfer::cuda
