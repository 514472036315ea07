// Ternary weights times int8_token operands: exact integer sums by the tensor cores, then the float
// operations of ops/matmul.h in their order, so that the bits are those of every other kernel.
//
// A block of threads takes a unit as in stream_matmul.h, 32 rows. Sums of rows with one scale are
// added at the end, in any order: they are integers. Where scales differ between blocks of 256 k,
// four blocks' sums go through shared memory at a time and a thread a row and token scales and adds
// them in order.
//
// Weights and activations come by copies, so far ahead as places reach, and all that the launch
// names is asked for at once: a block waits for memory once. On Hopper these are bulk copies, of
// rounds of four to 16 blocks of 256 k, whose halves the four warps share evenly; else each warp
// copies blocks for itself. Blocks of threads are small, so that those of the next launch have room
// beside them and ask for their weights while these multiply.
#pragma once

#include <cmath>

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/bodies/ternary_bulk.h"
#include "cuda/bodies/ternary_copies.h"
#include "cuda/bodies/ternary_place.h"
#include "cuda/bodies/ternary_products.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

template <ops::QuantBits kBits, int kTiles>
struct TernaryMatmul {
  static constexpr const char* kName = "matmul_ternary";
  static constexpr int kWarps = kTernaryWarps;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kMinBlocks = kTiles == 1 && kBits == ops::QuantBits::t2 ? 6 : 4;
  static constexpr bool kWaitsItself = true;
  static constexpr bool kAdapts = true;
  static constexpr int kTokens = kTiles * 8;
  static constexpr int kOwnTokens = kTokens / kWarps;  // of which a thread adds up a row's sums
  static constexpr int kRows = 32;
  // Of a warp, as ternary_copies.h has them; of the last ones only those that a block of 256 k has.
  // The sums [token][row] of what was multiplied take that of their block.
  static constexpr int kPlaces = kTiles == 1 ? 3 : 2;
  static constexpr int places_of(int blocks) {
    return blocks < kWarps ? kWarps : blocks < kPlaces * kWarps ? blocks : kPlaces * kWarps;
  }
  static_assert(kRows * static_cast<int>(sizeof(int32_t)) < kTernaryTokenBytes);
  using Params = TernaryParams;
  using Shared = TernaryShared;
  using Products = TernaryProducts<kBits, kTiles>;
  using Bulk = TernaryBulk<kBits>;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const TernaryPlace place = ternary_place(unit, p);
    const uint8_t* const group = ternary_group(p, place, unit.lane / 16);
    if (unit.has_bulk_copies()) {
      run_rounds(unit, p, place, group, shared);
    } else {
      run_blocks(unit, p, place, group, shared);
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void run_rounds(Unit& unit, const Params& p, const TernaryPlace& place,
                                         const uint8_t* group, Shared& shared) {
    Bulk bulk(p, place, *unit.kept_shared(&shared));
    bulk.start_weights(unit);
    const Header header = read_header(unit, p, group);
    unit.wait_for_inputs();
    bulk.start_tokens(unit);
    const Tails tails = read_tails(unit, p, place);
    const auto sums_of = [&](int warp) { return bulk.sums_at(warp); };
    Products sums(unit, place.num_tokens, p.rounds.token_stride);
    Result results[kOwnTokens] = {};
    unit.sync();  // barriers are there
    const bool divided = unit.ballot(header.uniform == 0) == 0;
    const auto halves = TernaryHalves::of<Bulk::kBlockBytes>(unit, p.rounds, divided);
    const int span = divided ? p.rounds.blocks : kWarps;
    const int last_lines = ternary_lines_of<kBits>(p, p.blocks - 1);
    const int missing = last_lines == Products::kWholeLines ? 0 : 1;
    const int rounds = (p.blocks + p.rounds.blocks - 1) / p.rounds.blocks;
    EFFINFER_NO_UNROLL
    for (int round = 0; round < rounds; ++round) {
      bulk.wait(unit);
      const uint8_t* const first_lines = bulk.weights() + halves.lines;
      const uint8_t* const first_tokens = bulk.tokens() + halves.tokens;
      const int blocks = bulk.blocks_of(round);
      const int whole = round + 1 < rounds ? blocks : blocks - missing;
      EFFINFER_NO_UNROLL
      for (int first = 0; first < blocks; first += span) {
        const uint8_t* lines = first_lines + first * Bulk::kBlockBytes;
        const uint8_t* tokens = first_tokens + first * 256;
        int block = first + halves.block;
        EFFINFER_NO_UNROLL
        for (int i = 0; i < halves.most && block < blocks; ++i) {
          const int odd = halves.odd + i * halves.odd_step;
          sums.add(unit, {lines, 256, tokens}, odd, block < whole, last_lines);
          block += halves.block_step;
          lines += halves.line_step;
          tokens += halves.token_step;
        }
        if (divided) break;
        if (first + unit.warp < blocks) sums.store(unit, place.num_tokens, sums_of(unit.warp));
        unit.sync();
        add_blocks(unit, p, place, group, round * p.rounds.blocks + first, sums_of, results);
        unit.sync();
      }
      const int next = round + p.rounds.places;
      if (next < rounds) {
        if (divided) unit.sync();  // all have read what comes in its place
        bulk.ask_again(unit, next);
      }
      bulk.advance();
    }
    if (divided) {
      sums.store(unit, place.num_tokens, sums_of(unit.warp));
      unit.sync();
      add_warps(unit, place, sums_of, results);
    }
    finish(unit, p, place, header, tails, results);
  }

  template <class Unit>
  EFFINFER_DEVICE static void run_blocks(Unit& unit, const Params& p, const TernaryPlace& place,
                                         const uint8_t* group, Shared& shared) {
    TernaryCopies<kBits> copies(unit, p, group, place.first_token, place.num_tokens);
    EFFINFER_UNROLL
    for (int i = 0; i < kPlaces; ++i) {
      copies.fetch_weights(unit, p, unit.warp + i * kWarps, place_at(p, shared, unit.warp, i));
    }
    const Header header = read_header(unit, p, group);
    unit.wait_for_inputs();
    EFFINFER_UNROLL
    for (int i = 0; i < kPlaces; ++i) {
      copies.fetch_tokens(unit, p, unit.warp + i * kWarps, place_at(p, shared, unit.warp, i));
      unit.commit();
    }
    const Tails tails = read_tails(unit, p, place);
    Products sums(unit, place.num_tokens, kTernaryTokenBytes);
    Result results[kOwnTokens] = {};
    const auto by_blocks = [&] { return unit.ballot(header.uniform == 0) != 0; };
    int at = 0;
    const auto sums_of = [&](int warp) {
      return reinterpret_cast<SumRow*>(place_at(p, shared, warp, at));
    };
    EFFINFER_NO_UNROLL
    for (int first = 0; first < p.blocks; first += kWarps) {
      const int block = first + unit.warp;
      uint8_t* const memory = place_at(p, shared, unit.warp, at);
      if (block < p.blocks) {
        unit.template wait<kPlaces - 1>();
        unit.sync_warp();
        const int lines = ternary_lines_of<kBits>(p, block);
        EFFINFER_NO_UNROLL
        for (int half = 0; half < 2; ++half) {
          constexpr int kStride = kWarp * 16;
          sums.add(unit,
                   {memory + TernaryCopies<kBits>::line_at(unit.lane) + half * 2 * kStride, kStride,
                    memory + kTernaryLineBytes + (8 * half + unit.lane % 4) * 4},
                   half, lines == Products::kWholeLines, lines);
        }
        unit.sync_warp();  // all have read what comes in its place
      }
      if (by_blocks()) {
        if (block < p.blocks) sums.store(unit, place.num_tokens, sums_of(unit.warp));
        unit.sync();
        add_blocks(unit, p, place, group, first, sums_of, results);
        unit.sync();
      }
      if (block < p.blocks) {
        const int next = block + kPlaces * kWarps;
        copies.fetch_weights(unit, p, next, memory);
        copies.fetch_tokens(unit, p, next, memory);
        unit.commit();
      }
      if (++at == kPlaces) at = 0;
    }
    if (!by_blocks()) {
      at = 0;
      sums.store(unit, place.num_tokens, sums_of(unit.warp));
      unit.sync();
      add_warps(unit, place, sums_of, results);
    }
    finish(unit, p, place, header, tails, results);
  }

  // Of a lane's group: whether rows have one scale, and that of its row.
  struct Header {
    int32_t uniform;
    float scale;
  };
  // Of the thread's tokens: the scale, and the sum of the values.
  struct Tails {
    float scale[kOwnTokens];
    int32_t ones[kOwnTokens];
  };
  // Of a row and a token: the sum of digits, and what the blocks with scales of their own add up
  // to.
  struct Result {
    int32_t digits;
    float scaled;
  };

  // Not unit.load() for what is needed first: the compiler would move it behind the wait for
  // inputs.
  template <class Unit>
  EFFINFER_DEVICE static Header read_header(Unit& unit, const Params& p, const uint8_t* group) {
    int32_t uniform = 1;
    if (!p.row_scales) {
      const Quad flag = unit.load_written(reinterpret_cast<const Quad*>(group + 64));
      uniform = static_cast<int32_t>(flag.words[0]);
    }
    return {uniform, unit.load(reinterpret_cast<const float*>(group) + unit.lane % 16)};
  }
  template <class Unit>
  EFFINFER_DEVICE static Tails read_tails(Unit& unit, const Params& p, const TernaryPlace& place) {
    Tails tails = {};
    EFFINFER_UNROLL
    for (int i = 0; i < kOwnTokens; ++i) {
      const int token = i * kWarps + unit.warp;
      if (token >= place.num_tokens) continue;
      const Quad tail =
          unit.load_written(reinterpret_cast<const Quad*>(ternary_tail(p, place, token)));
      tails.scale[i] = float_of(tail.words[0]);
      tails.ones[i] = static_cast<int32_t>(tail.words[1]);
    }
    return tails;
  }

  using SumRow = int32_t[kRows];

  EFFINFER_DEVICE static uint8_t* place_at(const Params& p, Shared& shared, int warp, int index) {
    return reinterpret_cast<uint8_t*>(&shared) +
           (index * kWarps + warp) * ternary_place_bytes(p.block_tokens);
  }
  // A thread has row thread % 32 of tokens thread / 32 + kWarps i.
  template <class Unit, class SumsOf>
  EFFINFER_DEVICE static void add_warps(const Unit& unit, const TernaryPlace& place,
                                        SumsOf&& sums_of, Result (&results)[kOwnTokens]) {
    EFFINFER_UNROLL
    for (int i = 0; i < kOwnTokens; ++i) {
      const int token = i * kWarps + unit.warp;
      if (token >= place.num_tokens) continue;
      for (int warp = 0; warp < kWarps; ++warp) {
        results[i].digits += sums_of(warp)[token][unit.lane];
      }
    }
  }

  template <class Unit, class SumsOf>
  EFFINFER_DEVICE static void add_blocks(Unit& unit, const Params& p, const TernaryPlace& place,
                                         const uint8_t* group, int first_block, SumsOf&& sums_of,
                                         Result (&results)[kOwnTokens]) {
    const uint8_t* scales = group + p.tail_offset;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < kWarps && first_block + i < p.blocks; ++i) {
      const int block = first_block + i;
      const float d = unit.from_f16(
          unit.load(reinterpret_cast<const uint16_t*>(scales) + block * 16 + unit.lane % 16));
      EFFINFER_UNROLL
      for (int j = 0; j < kOwnTokens; ++j) {
        const int token = j * kWarps + unit.warp;
        if (token >= place.num_tokens) continue;
        const int32_t digits = sums_of(i)[token][unit.lane];
        const int32_t ones = unit.load(ternary_tail(p, place, token) + 2 + block);
        results[j].digits += digits;
        results[j].scaled = fmaf(static_cast<float>(digits - ones), d, results[j].scaled);
      }
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void finish(Unit& unit, const Params& p, const TernaryPlace& place,
                                     const Header& header, const Tails& tails,
                                     const Result (&results)[kOwnTokens]) {
    const bool gated = p.glu != ops::UnaryOp::none;
    const int half = unit.lane / 16;
    const bool uniform = header.uniform != 0;
    const int row = gated ? place.unit * 16 + unit.lane % 16 : place.unit * kRows + unit.lane;
    EFFINFER_UNROLL
    for (int i = 0; i < kOwnTokens; ++i) {
      const int token = i * kWarps + unit.warp;
      if (token >= place.num_tokens) continue;
      const float scale = tails.scale[i];
      const auto sum = static_cast<float>(results[i].digits - tails.ones[i]);
      const float value = uniform ? unit.mul(sum, unit.mul(scale, header.scale))
                                  : unit.mul(results[i].scaled, scale);
      const float second = unit.shfl_xor(value, 16);
      if ((gated && half == 1) || row >= place.part->rows) continue;
      finish_output(unit, *place.part, p.parts[1], p.glu, p.operand, place.first_token + token, row,
                    value, second);
    }
    if (place.unit + 1 == (gated ? place.part->groups : ternary_units(*place.part))) {
      pad_operand(unit, p.operand, place.part->rows, place.first_token,
                  place.first_token + place.num_tokens, unit.thread, kThreads);
    }
  }
};

}  // namespace effinfer::cuda
