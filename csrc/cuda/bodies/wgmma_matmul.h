// y = x W^T for many tokens on Hopper: y^T = W x^T by wgmma, with W in registers, unpacked there
// (wgmma_weights.h), and x in shared memory.
//
// A block multiplies kRowTiles x 128 rows with kColumns tokens: two warpgroups, of which each warp
// has kRowTiles groups of 16 rows and all the tokens; and four warps that do nothing but fetch,
// some superblocks ahead: tiles of x by a tensor map, weights as they lie by bulk copies, a group's
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
  static constexpr int kWarps = 8;     // that multiply
  static constexpr int kFetchers = 4;  // other warps
  static constexpr int kThreads = (kWarps + kFetchers) * kWarp;
  static constexpr int kMinBlocks = 1;
  static constexpr int kArch = 90;
  static constexpr int kTokens = kColumns;
  static constexpr int kGroups = kWarps * kRowTiles;  // of 16 rows
  static constexpr int kUnits = kGroups / 2;
  static constexpr int kLanes = kGroups / kFetchers;  // of a warp that fetches
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
      if (unit.lane < kLanes) fetch(unit, p, shared);
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

  // A lane has a group; the first of all has the activations, too, and announces what all of them
  // bring: before that the phase does not end, whatever has come. No phase ends without each of
  // them, so that none is missed by one that waits.
  template <class Unit>
  EFFINFER_DEVICE static void fetch(Unit& unit, const Params& p, Shared& shared) {
    const int fetcher = unit.warp - kWarps;
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

  // A warp's groups of a stage, one chunk at a time.
  struct Loaded {
    Weights tiles[kRowTiles];

    template <class Unit>
    EFFINFER_DEVICE void load(const Unit& unit, const Shared& shared, int stage, int header,
                              int chunk) {
      EFFINFER_UNROLL
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const int group = unit.warp * kRowTiles + tile;
        tiles[tile].load(shared.ring[stage].weights[group], shared.headers[header][group],
                         unit.lane, chunk);
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
    HeaderTurn headers;
    unit.barrier_wait(shared.full[0], 0);
    loaded.load(unit, shared, 0, 0, 0);
    loaded.unpack(unit, 0, a[0]);
    fence(unit, sums);
    Mbarrier* done = nullptr;  // of the superblock before
    EFFINFER_NO_UNROLL
    for (int i = 0; i < superblocks; ++i) {
      const uint64_t x =
          unit.descriptor(shared.ring[turn.stage].x, 16, 8 * kRowBytes, Swizzle::bytes128);
      Mbarrier* const mine = &shared.empty[turn.stage];
      multiply_chunk(unit, a[0], x, sums);
      loaded.load(unit, shared, turn.stage, headers.index, 1);
      // Of the chunk before, which was the last of its superblock.
      wait(unit, a[1]);
      unit.sync_warp();  // all have read its weights
      if (done != nullptr && unit.lane == 0) unit.barrier_arrive(*done);
      loaded.unpack(unit, 1, a[1]);
      multiply_chunk(unit, a[1], x + kChunkSteps * 2, sums);
      turn.next();
      headers.next();
      done = mine;
      if (i + 1 == superblocks) break;
      unit.barrier_wait(shared.full[turn.stage], turn.parity);
      loaded.load(unit, shared, turn.stage, headers.index, 0);
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
