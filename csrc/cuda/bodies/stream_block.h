// The kernel around the inner loop of stream_matmul.h: which rows and which k a warp takes, and
// what becomes of its sums.
#pragma once

#include "cuda/bodies/stream_matmul.h"

namespace effinfer::cuda {

// A warp's shared memory: what feeds it (stream_feed.h), in whose place behind its barriers its
// sums come, [token][32]; those of the first of two rounds or slices lie behind it.
constexpr int stream_sum_bytes(int tokens) {
  return tokens * kStreamRows * static_cast<int>(sizeof(float));
}
constexpr int stream_warp_bytes(const PieceLayout& piece, const FeedShape& shape, int tokens,
                                int rounds) {
  const int sums = kBarrierBytes + stream_sum_bytes(tokens);
  const int feed = feed_bytes(piece, shape);
  return (feed > sums ? feed : sums) + (rounds - 1) * stream_sum_bytes(tokens);
}

// Of a slice's tokens.
template <int kSteps, int kTiles>
constexpr int stream_token_bytes(const FeedShape& shape, int tokens, bool in_boxes) {
  return shape.places * (in_boxes ? TokenBoxes<kSteps, kTiles>::place_bytes(shape, tokens)
                                  : TokenRows<kSteps>::place_bytes(shape, tokens));
}

// Whether 16 warps of a GPU have the registers for so many tiles. Of four some formats would have a
// few too few on Hopper; others have two rounds of 8 warps instead.
constexpr bool stream_has_tiles(const ops::PackedFormat& format, int tiles, int arch) {
  const bool super = format.scales == ops::ScaleKind::super;
  if (tiles == 4) return arch == 90 && format.bits >= ops::QuantBits::u8 && !super;
  const bool is_q3_k =
      format.bits == ops::QuantBits::u4 && super && !format.has_min && format.sub_block == 16;
  return tiles == 1 || arch == 90 || !is_q3_k;
}

// How much there is of it depends on the launch.
struct StreamShared {
  alignas(128) uint8_t first[128];

  EFFINFER_DEVICE uint8_t* warp(const StreamParams& p, int warp) {
    return reinterpret_cast<uint8_t*>(this) + warp * p.warp_bytes;
  }
  EFFINFER_DEVICE uint8_t* tokens(const StreamParams& p, int slice) {
    return reinterpret_cast<uint8_t*>(this) + p.tokens_at + slice * p.token_bytes;
  }
};

// A block has a slot for each slice of its units: a warp, or one of two rounds of one, or one of
// two slices in a row that a warp has. How many it has is said by the launch.
template <ops::PackedFormat kFormat, int kMostTokens, int kMostWarps, int kRounds = 1>
struct StreamMatmul {
  static constexpr const char* kName = "stream_matmul";
  static constexpr int kThreads = kMostWarps * kWarp;
  static constexpr int kMinBlocks = 1;
  static constexpr bool kWaitsItself = true;
  static constexpr bool kAdapts = true;
  static constexpr int kTiles = tiles_of(kMostTokens);
  static constexpr int kReplacedOn = kRounds == 2                            ? 90
                                     : stream_has_tiles(kFormat, kTiles, 80) ? 0
                                                                             : 80;
  static constexpr int kTokens = kMostTokens;
  static constexpr int kSlotRounds = kRounds;
  static_assert(kRounds == 1 || kRounds == 2);
  using Params = StreamParams;
  using Shared = StreamShared;
  using Product = StreamProduct<kFormat, kTokens>;

  static constexpr PieceLayout layout() { return piece_layout(kFormat); }
  static constexpr int warp_bytes(const FeedShape& shape, int tokens, int run_bits) {
    return stream_warp_bytes(layout(), shape, tokens, kRounds << run_bits);
  }
  static constexpr int token_bytes(const FeedShape& shape, int tokens, bool in_boxes) {
    return stream_token_bytes<layout().steps, kTiles>(shape, tokens, in_boxes);
  }

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& memory) {
    Shared& shared = *unit.kept_shared(&memory);
    const Place place = find(unit, p);
    const StreamPart& part = *place.part;
    const int warp = unit.shfl(unit.warp, 0);  // which the compiler then knows to be all lanes'
    if (unit.has_bulk_copies()) {
      init_barriers(unit, shared.warp(p, warp));
      // Those of the block's first unit are first in their teams, if there are any, and have these
      // teams' numbers.
      if (warp >> part.slice_bits == 0 && units_of(p, part) > 1) {
        init_barriers(unit, shared.warp(p, warp) + kTeamBarriers);
      }
    }
    for (int round = 0; round < kRounds; ++round) {
      const int slot = (warp << run_bits(p)) * kRounds + round;
      const int mine = place.first_unit + (slot >> part.slice_bits);
      if (mine < part.units) multiply(unit, p, place, mine, slot, shared);
    }
    unit.wait_for_inputs();
    unit.sync();
    // What was found above is found again, so that no register is kept for it.
    Unit again = unit.anew();
    finish(again, p, find(again, p), shared);
  }

 private:
  struct Place {
    const StreamPart* part;
    int first_unit;
    int first_token;
    int num_tokens;
  };

  EFFINFER_DEVICE static int run_bits(const Params& p) { return kTokens == 1 ? p.run_bits : 0; }
  EFFINFER_DEVICE static int slots_of_warp(const Params& p) { return kRounds << run_bits(p); }
  EFFINFER_DEVICE static int warps(const Params& p) {
    return (1 << p.slot_bits) / kRounds >> run_bits(p);
  }
  // log2 of the units of a block of the part.
  EFFINFER_DEVICE static int unit_bits(const Params& p, const StreamPart& part) {
    return p.slot_bits - part.slice_bits;
  }
  EFFINFER_DEVICE static int units_of(const Params& p, const StreamPart& part) {
    return 1 << unit_bits(p, part);
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
    return {part, block << unit_bits(p, *part), first,
            p.tokens - first < p.block_tokens ? p.tokens - first : p.block_tokens};
  }

  // Those of a unit: groups 2 u and 2 u + 1 of the part, or with GLU group u of both parts. Nobody
  // takes the sums of a second one that is none.
  EFFINFER_DEVICE static RowGroups groups_of(const StreamPart& part, int unit) {
    return {part.weight.data + unit * part.unit_bytes,
            unit < part.full_units ? part.half_bytes : 0};
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, const Place& place, int mine,
                                       int slot, Shared& shared) {
    const int slice_bits = place.part->slice_bits;
    const int slice = slot & ((1 << slice_bits) - 1);
    const int last_slice = slice + (1 << run_bits(p)) - 1;
    const int first = p.superblocks * slice >> slice_bits;
    const int last = p.superblocks * (last_slice + 1) >> slice_bits;
    const int of_warp = slots_of_warp(p);
    typename Product::Sums sums = {};
    const StreamMemory memory = {shared.warp(p, slot / of_warp), shared.tokens(p, slice / of_warp),
                                 shared.warp(p, slice / of_warp) + kTeamBarriers,
                                 team_of(p, place, mine, slice)};
    SliceEnd end;
    if (last_slice > slice) {  // which have as many places each
      const int places = (last - first) * Product::kParts >> p.feed.hold_bits;
      end = {places / 2, sums_of(p, shared, slot)};
    }
    Product::run(unit, p, groups_of(*place.part, mine), p.header_bytes,
                 {place.first_token, place.num_tokens, &p.x_map}, first, last, memory, sums, end);
    memory.team.sync(unit);  // all have read their last place
    sums.store(unit, place.num_tokens, sums_of(p, shared, slot + last_slice - slice));
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
    const int of_warp = slots_of_warp(p);
    uint8_t* memory = shared.warp(p, slot / of_warp);
    if (of_warp > 1 && slot % of_warp == 0) {
      memory += p.warp_bytes - stream_sum_bytes(p.block_tokens);
    } else {
      memory += kBarrierBytes;
    }
    return reinterpret_cast<StreamRow*>(memory);
  }

  // Of all slices of a unit, from its first slot on; four are loaded at a time. No sum is -0, which
  // finish_output() would have made a zero.
  EFFINFER_DEVICE static float sum_of(const Params& p, Shared& shared, int slot, int slice_bits,
                                      int token, int row) {
    constexpr int kAtOnce = 4;
    float sum = 0.0f;
    EFFINFER_NO_UNROLL
    for (int s = 0; s < 1 << slice_bits; s += kAtOnce) {
      float of[kAtOnce];
      EFFINFER_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        of[i] = s + i < 1 << slice_bits ? sums_of(p, shared, slot + s + i)[token][row] : 0.0f;
      }
      if (slice_bits == kMostSliceBits) {
        sum += of[0] + of[1];
        sum += of[2] + of[3];
      } else {
        EFFINFER_UNROLL
        for (int i = 0; i < kAtOnce; ++i) sum += of[i];
      }
    }
    return sum;
  }

  // Adds the slices of the block's units and writes their outputs.
  template <class Unit>
  EFFINFER_DEVICE static void finish(Unit& unit, const Params& p, const Place& place,
                                     Shared& shared) {
    const StreamPart& part = *place.part;
    const bool gated = p.glu != ops::UnaryOp::none;
    const int threads = warps(p) * kWarp;
    const int row_bits = gated ? 4 : 5;
    const int block_bits = row_bits + unit_bits(p, part);
    const int first = place.first_unit << row_bits;
    EFFINFER_NO_UNROLL
    for (int i = unit.thread; i < place.num_tokens << block_bits; i += threads) {
      const int token = i >> block_bits;
      const int row = i & ((1 << block_bits) - 1);
      if (first + row >= part.weight.rows) continue;
      const int slot = row >> row_bits << part.slice_bits;
      const int at = row & ((1 << row_bits) - 1);
      // The second weight's rows lie behind those of the first.
      float sum = 0.0f;
      float second = 0.0f;
      EFFINFER_NO_UNROLL
      for (int of = gated ? 1 : 0; of >= 0; --of) {
        second = sum;
        sum = sum_of(p, shared, slot, part.slice_bits, token, (of << row_bits) + at);
      }
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
