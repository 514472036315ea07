// The kernel around the inner loop of stream_matmul.h: which rows and which k a warp takes, and
// what becomes of its sums.
#pragma once

#include "cuda/bodies/stream_matmul.h"

namespace effinfer::cuda {

// A warp's activations, then its sums [token][32].
template <int kTiles>
union StreamMemory {
  StreamTokens<kTiles> tokens;
  float sums[kTiles * kTileTokens][kStreamRows];
};

// Moves a warp's sums to shared memory, in place of its activations.
template <int kTiles, class Unit>
EFFINFER_DEVICE void store_sums(Unit& unit, const StreamSums<kTiles>& sums,
                                StreamMemory<kTiles>& memory) {
  unit.sync_warp();  // all have read the activations
  const int g = unit.lane / 4;
  const int t = unit.lane % 4;
  EFFINFER_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float (&of)[2][4] = sums.values[tile];
      const Quad four = {
          {bits_of(of[0][i]), bits_of(of[0][2 + i]), bits_of(of[1][i]), bits_of(of[1][2 + i])}};
      *reinterpret_cast<Quad*>(&memory.sums[tile * kTileTokens + 2 * t + i][4 * g]) = four;
    }
  }
}

template <ops::PackedFormat kFormat, int kTiles, int kAhead, int kBlocks>
struct StreamMatmul {
  static constexpr const char* kName = "stream_matmul";
  static constexpr int kThreads = kStreamWarps * kWarp;
  static constexpr int kMinBlocks = kBlocks;
  static constexpr int kTokens = kTiles * kTileTokens;
  using Params = StreamParams;
  struct Shared {
    StreamMemory<kTiles> warps[kStreamWarps];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const Place place = find(unit, p);
    const StreamPart& part = *place.part;
    const int mine = place.first_unit + (unit.warp >> part.slice_bits);
    if (mine < part.units) {
      multiply(unit, p, place, mine, shared.warps[unit.warp]);
    }
    unit.sync();
    for (int i = 0; i < units_of(part) && place.first_unit + i < part.units; ++i) {
      finish(unit, p, place, i, shared);
    }
  }

 private:
  struct Place {
    const StreamPart* part;
    int first_unit;
    int first_token;
    int num_tokens;
  };

  EFFINFER_DEVICE static int units_of(const StreamPart& part) {
    return kStreamWarps >> part.slice_bits;
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
                                       StreamMemory<kTiles>& memory) {
    const int slice_bits = place.part->slice_bits;
    const int slice = unit.warp & ((1 << slice_bits) - 1);
    const int first = p.superblocks * slice >> slice_bits;
    const int last = p.superblocks * (slice + 1) >> slice_bits;
    StreamSums<kTiles> sums = {};
    StreamProduct<kFormat, kTiles, kAhead>::run(unit, p, group_of(p, *place.part, mine, unit.lane),
                                                p.x + place.first_token * p.x_row_bytes,
                                                place.num_tokens, first, last, memory.tokens, sums);
    store_sums(unit, sums, memory);
  }

  // Adds the slices of the block's unit `index` and writes its outputs.
  template <class Unit>
  EFFINFER_DEVICE static void finish(Unit& unit, const Params& p, const Place& place, int index,
                                     const Shared& shared) {
    const StreamPart& part = *place.part;
    const bool gated = p.glu != ops::UnaryOp::none;
    const int row_bits = gated ? 4 : 5;
    const int rows = 1 << row_bits;
    const int first = (place.first_unit + index) * rows;
    const int num_slices = 1 << part.slice_bits;
    const StreamMemory<kTiles>* slices = shared.warps + index * num_slices;
    for (int i = unit.thread; i < place.num_tokens * rows; i += kThreads) {
      const int token = i >> row_bits;
      const int row = i & (rows - 1);
      if (first + row >= part.weight.rows) continue;
      float sum = slices[0].sums[token][row];
      float second = gated ? slices[0].sums[token][rows + row] : 0.0f;
      for (int s = 1; s < num_slices; ++s) {
        sum += slices[s].sums[token][row];
        if (gated) second += slices[s].sums[token][rows + row];
      }
      finish_output(unit, part.weight, p.parts[1].weight, p.glu, p.operand,
                    place.first_token + token, first + row, sum, second);
    }
    if (place.first_unit + index + 1 == part.units) {
      pad_operand(unit, p.operand, part.weight.rows, place.first_token,
                  place.first_token + place.num_tokens, unit.thread, kThreads);
    }
  }
};

}  // namespace effinfer::cuda
