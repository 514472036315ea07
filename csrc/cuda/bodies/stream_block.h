// The kernel around the inner loop of stream_matmul.h: which rows and which k a warp takes, and
// what becomes of its sums.
#pragma once

#include "cuda/bodies/stream_matmul.h"

namespace effinfer::cuda {

// A warp's activations, then its sums [token][32]; those of the first of two rounds lie beside the
// activations of the second.
template <int kTiles, int kRounds = 1>
struct StreamMemory {
  static_assert(kRounds == 2);
  union {
    StreamTokens<kTiles> tokens;
    float sums[kTiles * kTileTokens][kStreamRows];
  };
  float before[kTiles * kTileTokens][kStreamRows];
};
template <int kTiles>
struct StreamMemory<kTiles, 1> {
  union {
    StreamTokens<kTiles> tokens;
    float sums[kTiles * kTileTokens][kStreamRows];
  };
};

// Moves a warp's sums to shared memory, in place of its activations once all have read them.
template <int kTiles, class Unit>
EFFINFER_DEVICE void store_sums(Unit& unit, const StreamSums<kTiles>& sums,
                                float (*to)[kStreamRows]) {
  const int g = unit.lane / 4;
  const int t = unit.lane % 4;
  EFFINFER_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float (&of)[2][4] = sums.values[tile];
      const Quad four = {
          {bits_of(of[0][i]), bits_of(of[0][2 + i]), bits_of(of[1][i]), bits_of(of[1][2 + i])}};
      *reinterpret_cast<Quad*>(&to[tile * kTileTokens + 2 * t + i][4 * g]) = four;
    }
  }
}

// A block has a slot for each slice of its units: a warp, or one of two rounds of one.
template <ops::PackedFormat kFormat, int kTiles, int kAhead, int kBlocks, int kWarps = kStreamWarps,
          int kRounds = 1>
struct StreamMatmul {
  static constexpr const char* kName = "stream_matmul";
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kMinBlocks = kBlocks;
  static constexpr bool kWaitsItself = true;
  static constexpr int kTokens = kTiles * kTileTokens;
  using Params = StreamParams;
  struct Shared {
    StreamMemory<kTiles, kRounds> warps[kWarps];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const Place place = find(unit, p);
    const StreamPart& part = *place.part;
    for (int round = 0; round < kRounds; ++round) {
      const int slot = unit.warp * kRounds + round;
      const int mine = place.first_unit + (slot >> part.slice_bits);
      if (mine < part.units) multiply(unit, p, place, mine, slot, shared);
    }
    unit.wait_for_inputs();
    unit.sync();
    finish(unit, p, place, shared);
  }

 private:
  struct Place {
    const StreamPart* part;
    int first_unit;
    int first_token;
    int num_tokens;
  };

  EFFINFER_DEVICE static int units_of(const StreamPart& part) {
    return kWarps * kRounds >> part.slice_bits;
  }

  // The token blocks of a unit are neighbours: all but the first find its weights in the L2 cache.
  template <class Unit>
  EFFINFER_DEVICE static Place find(const Unit& unit, const Params& p) {
    int first = 0;
    int block = unit.block;
    if (p.token_blocks > 1) {
      first = block % p.token_blocks * kTokens;
      block /= p.token_blocks;
    }
    const StreamPart* part = p.parts;
    while (block >= part->blocks) block -= (part++)->blocks;
    return {part, block * units_of(*part), first,
            p.tokens - first < kTokens ? p.tokens - first : kTokens};
  }

  // The lane's rows: of group 2 u + g / 4 of the part, or with GLU of group u of part g / 4.
  EFFINFER_DEVICE static GroupPlace group_of(const Params& p, const StreamPart& part, int unit,
                                             int lane) {
    const int half = lane / 16;
    const bool gated = p.glu != ops::UnaryOp::none;
    return group_place(gated ? p.parts[half].weight : part.weight, gated ? unit : 2 * unit + half,
                       p.header_bytes, lane);
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, const Place& place, int mine,
                                       int slot, Shared& shared) {
    const int slice_bits = place.part->slice_bits;
    const int slice = slot & ((1 << slice_bits) - 1);
    const int first = p.superblocks * slice >> slice_bits;
    const int last = p.superblocks * (slice + 1) >> slice_bits;
    StreamSums<kTiles> sums = {};
    StreamProduct<kFormat, kTiles, kAhead>::run(
        unit, p, group_of(p, *place.part, mine, unit.lane), p.x + place.first_token * p.x_row_bytes,
        place.num_tokens, first, last, shared.warps[unit.warp].tokens, sums);
    unit.sync_warp();  // all have read the activations
    store_sums(unit, sums, sums_of(shared, slot));
  }

  EFFINFER_DEVICE static auto sums_of(Shared& shared, int slot) -> float (*)[kStreamRows] {
    auto& memory = shared.warps[slot / kRounds];
    if constexpr (kRounds > 1) {
      if (slot % kRounds == 0) return memory.before;
    }
    return memory.sums;
  }

  // Of all slices of a unit, from its first slot on.
  EFFINFER_DEVICE static float sum_of(Shared& shared, int slot, int slice_bits, int token,
                                      int row) {
    const auto of = [&](int slice) { return sums_of(shared, slot + slice)[token][row]; };
    if (slice_bits < kMostSliceBits) {
      float sum = of(0);
      for (int s = 1; s < 1 << slice_bits; ++s) sum += of(s);
      return sum;
    }
    float sum = of(0) + of(1);
    for (int s = 2; s < 1 << kMostSliceBits; s += 2) sum += of(s) + of(s + 1);
    return sum;
  }

  // Adds the slices of the block's units and writes their outputs.
  template <class Unit>
  EFFINFER_DEVICE static void finish(Unit& unit, const Params& p, const Place& place,
                                     Shared& shared) {
    const StreamPart& part = *place.part;
    const bool gated = p.glu != ops::UnaryOp::none;
    const int row_bits = gated ? 4 : 5;
    const int rows = units_of(part) << row_bits;
    const int first = place.first_unit << row_bits;
    EFFINFER_NO_UNROLL
    for (int i = unit.thread; i < place.num_tokens * rows; i += kThreads) {
      const int token = i / rows;
      const int row = i & (rows - 1);
      if (first + row >= part.weight.rows) continue;
      const int slot = row >> row_bits << part.slice_bits;
      const int at = row & ((1 << row_bits) - 1);
      const float sum = sum_of(shared, slot, part.slice_bits, token, at);
      const float second =
          gated ? sum_of(shared, slot, part.slice_bits, token, (1 << row_bits) + at) : 0.0f;
      finish_output(unit, part.weight, p.parts[1].weight, p.glu, p.operand,
                    place.first_token + token, first + row, sum, second);
    }
    if (place.first_unit + units_of(part) >= part.units) {
      pad_operand(unit, p.operand, part.weight.rows, place.first_token,
                  place.first_token + place.num_tokens, unit.thread, kThreads);
    }
  }
};

}  // namespace effinfer::cuda
