// y = x W^T for many tokens on Hopper: y^T = W x^T by wgmma, with W in registers, unpacked there
// (wgmma_weights.h), and x in shared memory, where a tensor map brings it.
//
// A block multiplies 256 rows with kTokens tokens: two warpgroups of 128 rows each, that is 32 rows
// a warp, whose 16 bytes of weights are fragments of two products m64; and a warp that does nothing
// but fetch activations, kStages superblocks ahead.
//
//   - 128 rows x 128 tokens a warpgroup are 128 registers of sums;
//   - a superblock of 64 k takes the tensor cores 1024 cycles, while 25 KB (Q4) come through the
//     L2 cache: half of what a tile of 128 x 256 bfloat16 would need;
//   - in those cycles a scheduler issues what two warps need to unpack a superblock: 680 (Q4_0) to
//     950 (Q6_K) instructions of the machine code for sm_90a.
//
// Each warpgroup keeps the products of two steps under way while it unpacks the next one. Weights
// come by asynchronous copies to a ring of each warp (stream_ring.h), three superblocks ahead.
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

template <ops::PackedFormat kFormat, int kColumns>
struct WgmmaMatmul {
  static constexpr const char* kName = "wgmma_matmul";
  static constexpr int kWarps = kTileWarps;  // that multiply
  static constexpr int kThreads = (kWarps + 4) * kWarp;
  static constexpr int kMinBlocks = 1;
  static constexpr int kArch = 90;
  static constexpr int kTokens = kColumns;
  static constexpr int kStages = 8;
  static constexpr int kRowBytes = static_cast<int>(ops::kSuperblock) * 2;
  static constexpr int kStageBytes = kTokens * kRowBytes;
  static constexpr int kSteps = static_cast<int>(ops::kSuperblock) / 16;
  // Steps whose products are under way, and that have places for their fragments.
  static constexpr int kPending = 2;
  static constexpr int kFragments = 2 * kPending;
  using Params = WgmmaParams;
  using Weights = WgmmaWeights<kFormat>;
  using Of = PlaceOf<kFormat>;
  static constexpr int kParts = kSteps / Of::kSteps;   // places of a superblock
  static constexpr int kPlaces = kParts == 1 ? 4 : 5;  // of a warp's ring
  struct Shared {
    union {
      alignas(1024) uint8_t ring[kStages][kStageBytes];
      TileResults<kTokens> results[kWarps];  // as large
    };
    alignas(128) uint8_t weights[kWarps][kPlaces][Of::kWeightBytes];
    Mbarrier full[kStages];
    Mbarrier empty[kStages];
  };

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
    // 2 x 240 + 24 registers are what three warpgroups of 168 have.
    if (unit.warp >= kWarps) {
      unit.template give_registers<24>();
      if (unit.thread == kWarps * kWarp) fetch(unit, p, shared);
    } else {
      unit.template take_registers<240>();
      multiply(unit, p, shared);
    }
  }

 private:
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

  template <class Unit>
  EFFINFER_DEVICE static void fetch(Unit& unit, const Params& p, Shared& shared) {
    const int first = tile_block<kWarps, kTokens>(p.tile, unit.block).first_token;
    Turn turn;
    for (int i = 0; i < p.tile.superblocks; ++i) {
      unit.barrier_wait(shared.empty[turn.stage], turn.parity ^ 1);
      Mbarrier& full = shared.full[turn.stage];
      unit.barrier_arrive_expect(full, kStageBytes);
      unit.copy_tile(shared.ring[turn.stage], p.x, i * static_cast<int>(ops::kSuperblock), first,
                     full);
      turn.next();
    }
  }

  // A superblock of weights, and fragments of some steps, each of two pairs of rows: a step's are
  // made while the products of kPending others go on.
  struct Ahead {
    Weights raw;
    typename Weights::Affine affine;
    uint32_t a[kFragments][2][4];

    template <class Unit>
    EFFINFER_DEVICE void unpack(Unit& unit, int step) {
      if (step % Weights::kBlockSteps == 0) affine = raw.affine(unit, step);
      raw.fragments(unit, affine, step, unit.lane % 4, a[step % kFragments]);
    }
  };

  using Ring = WeightRing<kFormat, WgmmaPieces<kFormat.bits>, kPlaces>;

  template <class Unit>
  EFFINFER_DEVICE static void load(Unit& unit, Ring& ring, Weights& raw) {
    EFFINFER_UNROLL
    for (int part = 0; part < kParts; ++part) raw.load(ring.next(unit), part, unit.lane);
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, Shared& shared) {
    const TileBlock block = tile_block<kWarps, kTokens>(p.tile, unit.block);
    const int index = block.first_unit + unit.warp;
    const int superblocks = p.tile.superblocks;
    const uint8_t* group = tile_group(p.tile, p.tile.parts[block.part], index, unit.lane);
    Ring ring = {{group, p.tile.header_bytes, p.tile.header_row_bytes, unit.lane, 0},
                 shared.weights[unit.warp],
                 superblocks * kParts};
    float sums[2][kTokens / 2] = {};
    Ahead ahead;
    ring.start(unit);
    load(unit, ring, ahead.raw);
    ahead.unpack(unit, 0);
    unit.wgmma_fence(sums[0], sums[1]);
    Turn turn;
    Mbarrier* done = nullptr;  // of the superblock before
    EFFINFER_NO_UNROLL
    for (int i = 0; i < superblocks; ++i) {
      unit.barrier_wait(shared.full[turn.stage], turn.parity);
      const uint64_t x =
          unit.descriptor(shared.ring[turn.stage], 16, 8 * kRowBytes, Swizzle::bytes128);
      EFFINFER_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        multiply_step(unit, ahead.a[step % kFragments], x + static_cast<uint64_t>(step * 2), sums);
        unit.template wgmma_wait<kPending>();
        if (step == kPending - 1 && done != nullptr && unit.lane == 0) unit.barrier_arrive(*done);
        if (step + 1 < kSteps) ahead.unpack(unit, step + 1);
      }
      // The compiler does not know that products under way still read these registers.
      if constexpr (Weights::kMultipliesLoaded) unit.template wgmma_wait<0>(sums[0], sums[1]);
      if (i + 1 < superblocks) {
        load(unit, ring, ahead.raw);
        ahead.unpack(unit, 0);
      }
      done = &shared.empty[turn.stage];
      turn.next();
    }
    unit.template wgmma_wait<0>(sums[0], sums[1]);
    unit.sync_some(1, kWarps * kWarp);  // nobody reads the ring any more
    finish(unit, p.tile, block, index, sums, shared.results[unit.warp]);
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply_step(Unit& unit, uint32_t (&a)[2][4], uint64_t x,
                                            float (&sums)[2][kTokens / 2]) {
    unit.wgmma_fence(a[0], a[1]);
    unit.wgmma(sums[0], a[0], x);
    unit.wgmma(sums[1], a[1], x);
    unit.wgmma_commit();
  }

  // Through shared memory: each lane has four rows of tokens 2 t and 2 t + 1 of each eight, and
  // stores are to be of many rows of a token.
  template <class Unit>
  EFFINFER_DEVICE static void finish(Unit& unit, const TileParams& p, const TileBlock& block,
                                     int index, const float (&sums)[2][kTokens / 2],
                                     TileResults<kTokens>& results) {
    EFFINFER_UNROLL
    for (int tile = 0; tile < kTokens / 8; ++tile) {
      float values[2][4];
      EFFINFER_UNROLL
      for (int i = 0; i < 8; ++i) values[i / 4][i % 4] = sums[i / 4][tile * 4 + i % 4];
      results.store(unit, tile, values);
    }
    unit.sync_warp();
    const TilePart& part = p.parts[block.part];
    if (index < part.units) {
      finish_tokens(unit, p, part, index, block.first_token, block.num_tokens, results, unit.lane,
                    kWarp);
    }
    if (block.first_unit + kWarps >= part.units) {
      pad_operand(unit, p.operand, part.weight.rows, block.first_token,
                  block.first_token + block.num_tokens, unit.thread, kWarps * kWarp);
    }
  }
};

}  // namespace effinfer::cuda
