// The kernel around the inner loop of stream_matmul.h: which rows and which k a warp takes, and
// what becomes of its sums.
#pragma once

#include "cuda/bodies/stream_matmul.h"

namespace effinfer::cuda {

// A warp's shared memory: what feeds it (stream_feed.h), in whose place behind its barriers its
// sums come, [token][32]; those of the first of two rounds lie behind it.
constexpr int stream_sum_bytes(int tokens) {
  return tokens * kStreamRows * static_cast<int>(sizeof(float));
}
constexpr int stream_warp_bytes(const PieceLayout& piece, const FeedShape& shape, int tokens,
                                int rounds) {
  const int sums = kBarrierBytes + stream_sum_bytes(tokens);
  const int feed = feed_bytes(piece, shape);
  return (feed > sums ? feed : sums) + (rounds - 1) * stream_sum_bytes(tokens);
}

// How much there is of it depends on the launch.
struct StreamShared {
  alignas(128) uint8_t first[128];

  EFFINFER_DEVICE uint8_t* warp(const StreamParams& p, int warp) {
    return reinterpret_cast<uint8_t*>(this) + warp * p.warp_bytes;
  }
  EFFINFER_DEVICE uint8_t* tokens(const StreamParams& p, int warps, int slice) {
    return reinterpret_cast<uint8_t*>(this) + warps * p.warp_bytes + slice * p.token_bytes;
  }
};

using StreamRow = float[kStreamRows];  // the sums of a token

// Moves a warp's sums of its first tokens to shared memory.
template <int kTiles, class Unit>
EFFINFER_DEVICE void store_sums(Unit& unit, const StreamSums<kTiles>& sums, int tokens,
                                StreamRow* to) {
  const int g = unit.lane / 4;
  const int t = unit.lane % 4;
  EFFINFER_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float (&of)[2][4] = sums.values[tile];
      const Quad four = {
          {bits_of(of[0][i]), bits_of(of[0][2 + i]), bits_of(of[1][i]), bits_of(of[1][2 + i])}};
      const int token = tile * kTileTokens + 2 * t + i;
      if (token < tokens) *reinterpret_cast<Quad*>(&to[token][4 * g]) = four;
    }
  }
}

// A block has a slot for each slice of its units: a warp, or one of two rounds of one. How many it
// has is said by the launch.
template <ops::PackedFormat kFormat, int kTiles, int kMostWarps, int kRounds = 1>
struct StreamMatmul {
  static constexpr const char* kName = "stream_matmul";
  static constexpr int kThreads = kMostWarps * kWarp;
  static constexpr int kMinBlocks = 1;
  static constexpr bool kWaitsItself = true;
  static constexpr bool kAdapts = true;
  static constexpr int kTokens = kTiles * kTileTokens;
  static constexpr int kSlotRounds = kRounds;
  static_assert(kRounds == 1 || kRounds == 2);
  using Params = StreamParams;
  using Shared = StreamShared;
  using Product = StreamProduct<kFormat, kTiles>;

  static constexpr PieceLayout layout() { return piece_layout(kFormat); }
  static constexpr int warp_bytes(const FeedShape& shape, int tokens) {
    return stream_warp_bytes(layout(), shape, tokens, kRounds);
  }

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& memory) {
    Shared& shared = *unit.kept_shared(&memory);
    const Place place = find(unit, p);
    const StreamPart& part = *place.part;
    FeedState state;
    const int warp = unit.shfl(unit.warp, 0);  // which the compiler then knows to be all lanes'
    if (unit.has_bulk_copies()) {
      init_barriers(unit, shared.warp(p, warp), p.feed.places);
      // Those of the block's first unit are first in their teams, if there are any.
      const int teams = part.slice_bits == 0 ? 1 : (1 << part.slice_bits) / kRounds;
      if (warp < teams && units_of(p, part) > 1) {
        init_barriers(unit, shared.tokens(p, p.slots / kRounds, warp), p.feed.places);
      }
    }
    for (int round = 0; round < kRounds; ++round) {
      const int slot = warp * kRounds + round;
      const int mine = place.first_unit + (slot >> part.slice_bits);
      if (mine < part.units) multiply(unit, p, place, mine, slot, shared, state);
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

  EFFINFER_DEVICE static int units_of(const Params& p, const StreamPart& part) {
    return p.slots >> part.slice_bits;
  }

  // The token blocks of a unit are neighbours: all but the first find its weights in the L2 cache.
  template <class Unit>
  EFFINFER_DEVICE static Place find(const Unit& unit, const Params& p) {
    int first = 0;
    int block = unit.block;
    if (p.token_blocks > 1) {
      first = block % p.token_blocks * p.block_tokens;
      block /= p.token_blocks;
    }
    const StreamPart* part = p.parts;
    while (block >= part->blocks) block -= (part++)->blocks;
    return {part, block * units_of(p, *part), first,
            p.tokens - first < p.block_tokens ? p.tokens - first : p.block_tokens};
  }

  // The rows of half of the lanes: of group 2 u + half of the part, or with GLU of group u of part
  // `half`.
  EFFINFER_DEVICE static const uint8_t* group_of(const Params& p, const StreamPart& part, int unit,
                                                 int half) {
    const bool gated = p.glu != ops::UnaryOp::none;
    return row_group(gated ? p.parts[half].weight : part.weight, gated ? unit : 2 * unit + half);
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, const Place& place, int mine,
                                       int slot, Shared& shared, FeedState& state) {
    const int slice_bits = place.part->slice_bits;
    const int slice = slot & ((1 << slice_bits) - 1);
    const int first = p.superblocks * slice >> slice_bits;
    const int last = p.superblocks * (slice + 1) >> slice_bits;
    StreamSums<kTiles> sums = {};
    const uint8_t* const groups[2] = {group_of(p, *place.part, mine, 0),
                                      group_of(p, *place.part, mine, 1)};
    const StreamMemory memory = {shared.warp(p, slot / kRounds),
                                 shared.tokens(p, p.slots / kRounds, slice / kRounds),
                                 team_of(p, place, mine, slice)};
    Product::run(unit, p, groups, p.header_bytes,
                 {p.x + place.first_token * p.x_row_bytes, p.x_row_bytes, place.num_tokens}, first,
                 last, memory, state, sums);
    memory.team.sync(unit);  // all have read their last place
    store_sums(unit, sums, place.num_tokens, sums_of(p, shared, slot));
  }

  // Each unit of the block has a warp with this slice in this round, but where there is one slice
  // every other unit.
  EFFINFER_DEVICE static Team team_of(const Params& p, const Place& place, int mine, int slice) {
    const StreamPart& part = *place.part;
    const int stride = part.slice_bits == 0 ? kRounds : 1;
    const int left = part.units - place.first_unit;
    const int units = left < units_of(p, part) ? left : units_of(p, part);
    const int index = mine - place.first_unit;
    return {index / stride, (units - index % stride + stride - 1) / stride, slice + 1};
  }

  EFFINFER_DEVICE static StreamRow* sums_of(const Params& p, Shared& shared, int slot) {
    uint8_t* memory = shared.warp(p, slot / kRounds);
    if (kRounds > 1 && slot % kRounds == 0) {
      memory += p.warp_bytes - stream_sum_bytes(p.block_tokens);
    } else {
      memory += kBarrierBytes;
    }
    return reinterpret_cast<StreamRow*>(memory);
  }

  // Of all slices of a unit, from its first slot on.
  EFFINFER_DEVICE static float sum_of(const Params& p, Shared& shared, int slot, int slice_bits,
                                      int token, int row) {
    const auto of = [&](int slice) { return sums_of(p, shared, slot + slice)[token][row]; };
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
    const int threads = p.slots / kRounds * kWarp;
    const int row_bits = gated ? 4 : 5;
    const int rows = units_of(p, part) << row_bits;
    const int first = place.first_unit << row_bits;
    EFFINFER_NO_UNROLL
    for (int i = unit.thread; i < place.num_tokens * rows; i += threads) {
      const int token = i / rows;
      const int row = i & (rows - 1);
      if (first + row >= part.weight.rows) continue;
      const int slot = row >> row_bits << part.slice_bits;
      const int at = row & ((1 << row_bits) - 1);
      const float sum = sum_of(p, shared, slot, part.slice_bits, token, at);
      const float second =
          gated ? sum_of(p, shared, slot, part.slice_bits, token, (1 << row_bits) + at) : 0.0f;
      finish_output(unit, part.weight, p.parts[1].weight, p.glu, p.operand,
                    place.first_token + token, first + row, sum, second);
    }
    if (place.first_unit + units_of(p, part) >= part.units) {
      pad_operand(unit, p.operand, part.weight.rows, place.first_token,
                  place.first_token + place.num_tokens, unit.thread, threads);
    }
  }
};

}  // namespace effinfer::cuda
