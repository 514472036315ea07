// y = x W^T for many tokens on Hopper: y^T = W x^T by wgmma, with W in registers, unpacked there
// (wgmma_weights.h), and x in shared memory.
//
// A block multiplies 128 rows with kTokens tokens: two warpgroups, of which each warp has a group
// of 16 rows and all the tokens; and four warps that do nothing but fetch, some superblocks ahead:
// tiles of x by a tensor map, weights as they lie by bulk copies, a group's superblock each. Those
// that multiply spend no instruction on memory but reads of shared memory.
//
//   - 128 rows x 256 tokens are 128 registers of sums, as 256 x 128 would be, for which each warp
//     would unpack twice as many weights: more than it can while the tensor cores are busy;
//   - a superblock of 64 k takes the tensor cores 1024 cycles, while 37 KB (Q4) come through the
//     L2 cache.
//
// Each warpgroup unpacks a chunk of 32 k while the products of the one before are under way.
//
// A sum is one chain of products in the order of k: a token's bits do not depend on how many there
// are, nor on what the others hold.
#pragma once

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/bodies/tile_block.h"
#include "cuda/bodies/wgmma_ring.h"
#include "cuda/bodies/wgmma_weights.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

template <ops::PackedFormat kFormat, int kColumns>
struct WgmmaMatmul {
  static constexpr const char* kName = "wgmma_matmul";
  static constexpr int kWarps = kWgmmaWarps;
  static constexpr int kThreads = (kWarps + kWgmmaFetchers) * kWarp;
  static constexpr int kMinBlocks = 1;
  static constexpr int kArch = 90;
  static constexpr int kTokens = kColumns;
  static constexpr int kProductTokens = 128;
  static constexpr int kSums = kTokens / kProductTokens;
  static constexpr int kChunks = static_cast<int>(ops::kSuperblock) / (16 * kChunkSteps);
  using Params = WgmmaParams;
  using Ring = WgmmaRing<kFormat, kTokens>;
  using Shared = Ring::Shared;
  static constexpr int kUnits = Ring::kUnits;
  using Weights = WgmmaWeights<kFormat>;
  static_assert(kChunks == 2);

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (unit.thread == 0) Ring::start(unit, shared);
    unit.sync();
    // 2 x 232 + 40 registers are what three warpgroups of 168 have.
    if (unit.warp >= kWarps) {
      unit.template give_registers<40>();
      if (unit.lane < Ring::kLanes) Ring::fetch(unit, p, shared);
    } else {
      unit.template take_registers<232>();
      multiply(unit, p, shared);
    }
  }

 private:
  using Sums = float[kSums][kProductTokens / 2];
  using Fragments = ChunkFragments;

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, Shared& shared) {
    const int superblocks = p.tile.superblocks;
    Sums sums = {};
    Fragments a[kChunks] = {};
    Weights loaded;
    typename Ring::Turn turn;
    typename Ring::HeaderTurn headers;
    unit.barrier_wait(shared.full[0], 0);
    load(unit, shared, 0, 0, 0, loaded);
    loaded.fragments(unit, unit.lane, 0, a[0]);
    fence(unit, sums);
    Mbarrier* done = nullptr;  // of the superblock before
    EFFINFER_NO_UNROLL
    for (int i = 0; i + 1 < superblocks; ++i) {
      const uint64_t x = activations(unit, shared, turn);
      Mbarrier* const mine = &shared.empty[turn.stage];
      multiply_chunk(unit, a[0], x, sums);
      load(unit, shared, turn.stage, headers.index, 1, loaded);
      // Of the chunk before, which was the last of its superblock.
      wait(unit, a[1]);
      unit.sync_warp();  // all have read its weights
      if (done != nullptr && unit.lane == 0) unit.barrier_arrive(*done);
      turn.next();
      headers.next();
      // On its way while the chunk before is unpacked.
      unit.barrier_wait(shared.full[turn.stage], turn.parity);
      Weights next;
      load(unit, shared, turn.stage, headers.index, 0, next);
      loaded.fragments(unit, unit.lane, 1, a[1]);
      multiply_chunk(unit, a[1], x + kChunkSteps * 2, sums);
      done = mine;
      wait(unit, a[0]);
      loaded = next;
      loaded.fragments(unit, unit.lane, 0, a[0]);
    }
    const uint64_t x = activations(unit, shared, turn);
    multiply_chunk(unit, a[0], x, sums);
    load(unit, shared, turn.stage, headers.index, 1, loaded);
    wait(unit, a[1]);
    loaded.fragments(unit, unit.lane, 1, a[1]);
    multiply_chunk(unit, a[1], x + kChunkSteps * 2, sums);
    wait_all(unit, sums);
    unit.sync_some(1, kWarps * kWarp);  // nobody reads the ring any more
    finish(unit, p.tile, sums, shared.results);
  }

  template <class Unit>
  EFFINFER_DEVICE static uint64_t activations(Unit& unit, Shared& shared,
                                              const typename Ring::Turn& turn) {
    return unit.descriptor(shared.ring[turn.stage].x, 16, 8 * Ring::kRowBytes, Swizzle::bytes128);
  }

  // A chunk of a warp's group.
  template <class Unit>
  EFFINFER_DEVICE static void load(const Unit& unit, const Shared& shared, int stage, int header,
                                   int chunk, Weights& weights) {
    weights.load(shared.ring[stage].weights[unit.warp], shared.headers[header][unit.warp],
                 unit.lane, chunk);
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply_chunk(Unit& unit, Fragments& a, uint64_t x, Sums& sums) {
    unit.wgmma_fence(a[0], a[1]);
    EFFINFER_UNROLL
    for (int step = 0; step < kChunkSteps; ++step) {
      EFFINFER_UNROLL
      for (int i = 0; i < kSums; ++i) {
        constexpr int kTile = kProductTokens * Ring::kRowBytes / 16;
        unit.wgmma(sums[i], a[step], x + static_cast<uint64_t>(step * 2 + i * kTile));
      }
    }
    unit.wgmma_commit();
  }

  // Until only the newest chunk is under way. Registers of the one before, `a`, are in use until
  // here, which the compiler knows by this alone.
  template <class Unit>
  EFFINFER_DEVICE static void wait(Unit& unit, Fragments& a) {
    unit.template wgmma_wait<1>(a[0], a[1]);
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
  // stores are to be of many rows of a token. A unit is of two warps.
  template <class Unit>
  EFFINFER_DEVICE static void finish(Unit& unit, const TileParams& p, const Sums& sums,
                                     TileResults<kTokens> (&all)[kUnits]) {
    const TileBlock block = Ring::block_of(p, unit.block);
    const int index = unit.warp / 2;
    TileResults<kTokens>& results = all[index];
    EFFINFER_UNROLL
    for (int i = 0; i < kSums; ++i) {
      EFFINFER_UNROLL
      for (int tile = 0; tile < kProductTokens / 8; ++tile) {
        float values[4];
        EFFINFER_UNROLL
        for (int j = 0; j < 4; ++j) values[j] = sums[i][tile * 4 + j];
        results.store_rows(unit, i * (kProductTokens / 8) + tile, unit.warp % 2, values);
      }
    }
    unit.sync_some(2 + index, 2 * kWarp);
    const TilePart& part = p.parts[block.part];
    if (block.first_unit + index < part.units) {
      finish_tokens<4>(unit, p, part, block.first_unit + index, block.first_token, block.num_tokens,
                       results, unit.warp % 2 * kWarp + unit.lane, 2 * kWarp);
    }
    if (block.first_unit + kUnits >= part.units) {
      pad_operand(unit, p.operand, part.weight.rows, block.first_token,
                  block.first_token + block.num_tokens, unit.thread, kWarps * kWarp);
    }
  }
};

}  // namespace effinfer::cuda
