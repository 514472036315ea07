// y = x W^T for many tokens on Hopper: y^T = W x^T by wgmma, with W in registers, unpacked there
// (wgmma_weights.h), and x in shared memory, where a tensor map brings it.
//
// A block multiplies 256 rows with kTokens tokens: two warpgroups of 128 rows each, that is 32 rows
// a warp, whose 16 bytes of weights are fragments of two products m64; and a warp that does nothing
// but fetch activations, kStages superblocks ahead.
//
//   - 128 rows x 128 tokens a warpgroup are 128 registers of sums;
//   - a superblock of 64 k takes the tensor cores 1024 cycles, while 25 KB come through the L2
//   cache
//     (Q4): half of what a tile of 128 x 256 bfloat16 would need;
//   - unpacking a step of 16 k costs a warp some 60 instructions. Two warps share a scheduler, so
//     120 to 150 of the 256 cycles that the step's products take.
//
// Each warpgroup keeps the products of one or two steps under way while it unpacks the next one.
// Weights go from memory to registers two superblocks ahead.
//
// A sum is one chain of products in the order of k: a token's bits do not depend on how many there
// are, nor on what the others hold.
#pragma once

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/bodies/row_groups.h"
#include "cuda/bodies/wgmma_weights.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

struct WgmmaPart {
  MatmulWeight weight;
  int32_t units = 0;   // of 32 rows, or 16 of each weight of a GLU
  bool fours = false;  // has_fours()
};

// Weights of one format, times all tokens. With GLU the second part is the linear one.
struct WgmmaParams {
  TensorMap x;  // boxes of 64 k and the kernel's tokens
  int32_t tokens = 0;
  int32_t superblocks = 0;
  int32_t token_blocks = 0;
  int32_t row_blocks = 0;  // of all parts
  ops::UnaryOp glu = ops::UnaryOp::none;
  int64_t header_bytes = 0;      // of a group
  int64_t header_row_bytes = 0;  // of the scales in it
  WgmmaPart parts[ops::kMaxMatmulParts];
  OperandOut operand;
};

// The sums of a warp's 32 rows, in quads of rows: quad n of token i at n ^ (i % 8), so that eight
// lanes meet all banks when they store and when they read.
template <int kTokens>
struct WgmmaResults {
  Quad quads[kTokens][8];

  EFFINFER_DEVICE Quad& at(int token, int n) { return quads[token][n ^ (token % 8)]; }
};

// What a block multiplies.
struct WgmmaTile {
  const WgmmaPart* part;
  int first_unit;
  int first_token;
  int num_tokens;
};

template <ops::PackedFormat kFormat, int kColumns>
struct WgmmaMatmul {
  static constexpr const char* kName = "wgmma_matmul";
  static constexpr int kWarps = 8;  // that multiply
  static constexpr int kThreads = (kWarps + 4) * kWarp;
  static constexpr int kMinBlocks = 1;
  static constexpr int kArch = 90;
  static constexpr int kTokens = kColumns;
  static constexpr int kStages = 8;
  static constexpr int kRowBytes = static_cast<int>(ops::kSuperblock) * 2;
  static constexpr int kStageBytes = kTokens * kRowBytes;
  static constexpr int kSteps = static_cast<int>(ops::kSuperblock) / 16;
  // Steps whose products are under way, and that have places for their fragments: fewer where two
  // superblocks of weights take many registers.
  static constexpr int kPending = WgmmaWeights<kFormat>::kRegisters < 24 ? 2 : 1;
  static constexpr int kPlaces = 2 * kPending;
  using Params = WgmmaParams;
  using Weights = WgmmaWeights<kFormat>;
  struct Shared {
    union {
      alignas(1024) uint8_t ring[kStages][kStageBytes];
      WgmmaResults<kTokens> results[kWarps];  // as large
    };
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
  // Blocks that run at the same time share what they read through the L2 cache: of up to kBand
  // blocks of tokens each takes the same rows before they go on to the next.
  EFFINFER_DEVICE static WgmmaTile tile_of(const Params& p, int block) {
    constexpr int kBand = 8;
    const int band = block / (kBand * p.row_blocks);
    const int left = p.token_blocks - band * kBand;
    const int width = left < kBand ? left : kBand;
    const int rest = block - band * kBand * p.row_blocks;
    const int first = (band * kBand + rest % width) * kTokens;
    int row_block = rest / width;
    const WgmmaPart* part = p.parts;
    while (row_block >= blocks_of(*part)) row_block -= blocks_of(*part++);
    const int tokens = p.tokens - first;
    return {part, row_block * kWarps, first, tokens < kTokens ? tokens : kTokens};
  }
  EFFINFER_DEVICE static int blocks_of(const WgmmaPart& part) {
    return (part.units + kWarps - 1) / kWarps;
  }

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
    const int first = tile_of(p, unit.block).first_token;
    Turn turn;
    for (int i = 0; i < p.superblocks; ++i) {
      unit.barrier_wait(shared.empty[turn.stage], turn.parity ^ 1);
      Mbarrier& full = shared.full[turn.stage];
      unit.barrier_arrive_expect(full, kStageBytes);
      unit.copy_tile(shared.ring[turn.stage], p.x, i * static_cast<int>(ops::kSuperblock), first,
                     full);
      turn.next();
    }
  }

  // The lane's rows in a unit. One that is none repeats the last group, and nobody takes its sums.
  EFFINFER_DEVICE static WgmmaPlace place_of(const Params& p, const WgmmaPart& part, int index,
                                             int lane) {
    const int half = lane / 16;
    const bool gated = p.glu != ops::UnaryOp::none;
    const GroupPlace group = group_place(gated ? p.parts[half].weight : part.weight,
                                         gated ? index : 2 * index + half, p.header_bytes, lane);
    return {group.superblocks, group.header, p.header_row_bytes, lane % 4, lane / 4 % 4};
  }

  // Two superblocks of weights, and fragments of some steps, each of two pairs of rows: a step's
  // are made while the products of kPending others go on.
  struct Ahead {
    Weights raw[2];
    typename Weights::Affine affine;
    uint32_t a[kPlaces][2][4];

    // Fragments of a step of raw[i].
    template <class Unit>
    EFFINFER_DEVICE void unpack(Unit& unit, int i, int step) {
      if (step % Weights::kBlockSteps == 0) affine = raw[i].affine(unit, step);
      raw[i].fragments(unit, affine, step, unit.lane % 4, a[step % kPlaces]);
    }
  };

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, Shared& shared) {
    const WgmmaTile tile = tile_of(p, unit.block);
    const int index = tile.first_unit + unit.warp;
    const WgmmaPlace place = place_of(p, *tile.part, index, unit.lane);
    float sums[2][kTokens / 2] = {};
    Ahead ahead;
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (i < p.superblocks) ahead.raw[i].load(unit, place, i);
    }
    ahead.unpack(unit, 0, 0);
    unit.wgmma_fence(sums[0], sums[1]);
    Turn turn;
    Mbarrier* done = nullptr;  // of the superblock before
    for (int base = 0; base < p.superblocks; base += 2) {
      EFFINFER_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (base + i >= p.superblocks) break;
        unit.barrier_wait(shared.full[turn.stage], turn.parity);
        const uint64_t x =
            unit.descriptor(shared.ring[turn.stage], 0, 8 * kRowBytes, Swizzle::bytes128);
        EFFINFER_UNROLL
        for (int step = 0; step < kSteps; ++step) {
          multiply_step(unit, ahead.a[step % kPlaces], x + static_cast<uint64_t>(step * 2), sums);
          unit.template wgmma_wait<kPending>();
          if (step == kPending - 1 && done != nullptr && unit.lane == 0) unit.barrier_arrive(*done);
          if (step + 1 < kSteps) ahead.unpack(unit, i, step + 1);
        }
        if (base + i + 2 < p.superblocks) ahead.raw[i].load(unit, place, base + i + 2);
        if (base + i + 1 < p.superblocks) ahead.unpack(unit, i ^ 1, 0);
        done = &shared.empty[turn.stage];
        turn.next();
      }
    }
    unit.template wgmma_wait<0>(sums[0], sums[1]);
    unit.sync_some(1, kWarps * kWarp);  // nobody reads the ring any more
    finish(unit, p, tile, index, sums, shared.results[unit.warp]);
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
  EFFINFER_DEVICE static void finish(Unit& unit, const Params& p, const WgmmaTile& tile, int index,
                                     const float (&sums)[2][kTokens / 2],
                                     WgmmaResults<kTokens>& results) {
    EFFINFER_UNROLL
    for (int i = 0; i < kTokens / 4; ++i) {
      const int token = i / 2 * 8 + unit.lane % 4 * 2 + i % 2;
      const int at = i / 2 * 4 + i % 2;
      results.at(token, unit.lane / 4) = {{bits_of(sums[0][at]), bits_of(sums[0][at + 2]),
                                           bits_of(sums[1][at]), bits_of(sums[1][at + 2])}};
    }
    unit.sync_warp();
    const WgmmaPart& part = *tile.part;
    const bool gated = p.glu != ops::UnaryOp::none;
    const int quad_bits = gated ? 2 : 3;  // of rows of a result
    const int quads = 1 << quad_bits;
    const int count = index < part.units ? tile.num_tokens : 0;
    for (int i = unit.lane; i < count << quad_bits; i += kWarp) {
      const int token = i >> quad_bits;
      const int quad = i & (quads - 1);
      const int row = (index * quads + quad) * 4;
      if (row >= part.weight.rows) continue;
      finish_four(unit, part.weight, p.parts[1].weight, p.glu, p.operand, part.fours,
                  tile.first_token + token, row, results.at(token, quad),
                  results.at(token, gated ? quads + quad : quad));
    }
    if (tile.first_unit + kWarps >= part.units) {
      pad_operand(unit, p.operand, part.weight.rows, tile.first_token,
                  tile.first_token + tile.num_tokens, unit.thread, kWarps * kWarp);
    }
  }
};

}  // namespace effinfer::cuda
