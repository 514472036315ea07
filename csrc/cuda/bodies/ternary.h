// Ternary weights times int8_token operands: exact integer sums by the tensor cores, then the float
// operations of ops/matmul.h in their order, so that the bits are those of every other kernel.
//
// A block of threads takes a unit as in stream_matmul.h, 32 rows, and its four warps take turns at
// the blocks of 256 k. Sums of rows with one scale are added at the end, in any order: they are
// integers. Where scales differ between blocks, four blocks' sums go through shared memory at a
// time and a thread a row and token scales and adds them in order.
//
// Weights and activations come by asynchronous copies, kPlaces blocks of a warp at a time of 2 KB
// of weights, and so does all else that the launch names: a block waits for memory once. Blocks are
// small, so that those of the next launch have room beside them and ask for their weights while
// these multiply. Of t2 512 bytes of a warp take
// 43 instructions, where an H100 that reads 3 TB/s has 158 issue slots: memory bounds it. t1_6
// takes 168, and a quarter of its lanes' last loads are empty (13 lines in 4 x 4): instructions
// bound it, at the speed of t2 about, so t2 is the packing for a GPU unless memory is short.
#pragma once

#include <cmath>

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/bodies/ternary_copies.h"
#include "cuda/bodies/ternary_digits.h"
#include "cuda/bodies/ternary_place.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

template <ops::QuantBits kBits, int kTiles>
struct TernaryMatmul {
  static constexpr const char* kName = "matmul_ternary";
  static constexpr int kWarps = kTernaryWarps;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kMinBlocks = kTiles == 1 && kBits == ops::QuantBits::t2 ? 8 : 4;
  static constexpr bool kWaitsItself = true;
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
  using Digits = TernaryDigits<kBits>;
  using Shared = TernaryShared;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const TernaryPlace place = ternary_place(unit, p);
    const uint8_t* const group = ternary_group(p, place, unit.lane / 16);
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
    int32_t sums[kTiles][2][4] = {};
    Result results[kOwnTokens] = {};
    // Asked where it is needed: until then the header is on its way.
    const auto by_blocks = [&] { return unit.ballot(header.uniform == 0) != 0; };
    int at = 0;
    EFFINFER_NO_UNROLL
    for (int first = 0; first < p.blocks; first += kWarps) {
      const int block = first + unit.warp;
      uint8_t* const memory = place_at(p, shared, unit.warp, at);
      if (block < p.blocks) {
        unit.template wait<kPlaces - 1>();
        unit.sync_warp();
        if (ternary_dwords_of(p, block) == 64) {
          multiply<true>(unit, memory, kWholeLines, place.num_tokens, sums);
        } else {
          multiply<false>(unit, memory, ternary_lines_of<kBits>(p, block), place.num_tokens, sums);
        }
        unit.sync_warp();  // all have read what comes in its place
      }
      if (by_blocks()) {
        if (block < p.blocks) {
          store(unit, sums, place.num_tokens, sums_at(p, shared, unit.warp, at));
        }
        unit.sync();
        add_blocks(unit, p, place, group, first, at, shared, results);
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
      store(unit, sums, place.num_tokens, sums_at(p, shared, unit.warp, 0));
      unit.sync();
      add_warps(unit, p, place, shared, results);
    }
    finish(unit, p, place, header, tails, results);
  }

 private:
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
  EFFINFER_DEVICE static SumRow* sums_at(const Params& p, Shared& shared, int warp, int index) {
    return reinterpret_cast<SumRow*>(place_at(p, shared, warp, index));
  }

  static constexpr int kWholeLines = static_cast<int>(ops::ternary_lines(kBits, 64));

  // A whole block's addresses are the compiler's, and its lines do not wait for each other.
  template <bool kWhole, class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const uint8_t* memory, int num_lines,
                                       int num_tokens, int32_t (&sums)[kTiles][2][4]) {
    const int lines = kWhole ? kWholeLines : num_lines;
    constexpr int kSteps = Digits::kSteps;
    // Of tokens that are none another one's are multiplied, and nobody takes their sums.
    const uint8_t* mine[kTiles];
    EFFINFER_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const int token = tile * 8 + unit.lane / 4;
      mine[tile] = memory + kTernaryLineBytes +
                   (token < num_tokens ? token : 0) * kTernaryTokenBytes + unit.lane % 4 * 4;
    }
    const uint8_t* lines_at = memory + TernaryCopies<kBits>::line_at(unit.lane);
    EFFINFER_UNROLL
    for (int u = 0; u < 4; ++u) {
      if (4 * u >= lines) continue;
      const Quad quad = *reinterpret_cast<const Quad*>(lines_at + u * (kWarp * 16));
      uint32_t digits[4][2 * kSteps];
      EFFINFER_UNROLL
      for (int row = 0; row < 4; ++row) Digits::take(quad.words[row], digits[row]);
      EFFINFER_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        EFFINFER_UNROLL
        for (int tile = 0; tile < kTiles; ++tile) {
          uint32_t b[2] = {};
          EFFINFER_UNROLL
          for (int i = 0; i < 2; ++i) {
            // Dwords beyond a block, if any, are multiplied by digits of 0.
            if (2 * s + i >= Digits::kFields) continue;
            const uint8_t* dword = mine[tile] + ((2 * s + i) * lines + 4 * u) * 4;
            memcpy(&b[i], __builtin_assume_aligned(dword, 4), 4);
          }
          EFFINFER_UNROLL
          for (int pair = 0; pair < 2; ++pair) {
            unit.mma_s8(sums[tile][pair],
                        {digits[2 * pair][2 * s], digits[2 * pair + 1][2 * s],
                         digits[2 * pair][2 * s + 1], digits[2 * pair + 1][2 * s + 1]},
                        b);
          }
        }
      }
    }
  }

  // Moves a warp's sums to shared memory.
  template <class Unit>
  EFFINFER_DEVICE static void store(const Unit& unit, int32_t (&sums)[kTiles][2][4], int num_tokens,
                                    SumRow* out) {
    const int g = unit.lane / 4;
    const int t = unit.lane % 4;
    EFFINFER_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      EFFINFER_UNROLL
      for (int i = 0; i < 8; ++i) {
        int32_t& sum = sums[tile][i / 4][i % 4];
        const int token = tile * 8 + 2 * t + i % 2;
        if (token < num_tokens) out[token][4 * g + i / 4 * 2 + i % 4 / 2] = sum;
        sum = 0;
      }
    }
  }

  // A thread has row thread % 32 of tokens thread / 32 + kWarps i.
  template <class Unit>
  EFFINFER_DEVICE static void add_warps(const Unit& unit, const Params& p,
                                        const TernaryPlace& place, Shared& shared,
                                        Result (&results)[kOwnTokens]) {
    EFFINFER_UNROLL
    for (int i = 0; i < kOwnTokens; ++i) {
      const int token = i * kWarps + unit.warp;
      if (token >= place.num_tokens) continue;
      for (int warp = 0; warp < kWarps; ++warp) {
        results[i].digits += sums_at(p, shared, warp, 0)[token][unit.lane];
      }
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void add_blocks(Unit& unit, const Params& p, const TernaryPlace& place,
                                         const uint8_t* group, int first_block, int at,
                                         Shared& shared, Result (&results)[kOwnTokens]) {
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
        const int32_t digits = sums_at(p, shared, i, at)[token][unit.lane];
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
    const int units = gated ? place.part->groups : ternary_units(*place.part);
    if (place.unit + 1 == units) {
      pad_operand(unit, p.operand, place.part->rows, place.first_token,
                  place.first_token + place.num_tokens, unit.thread, kThreads);
    }
  }
};

}  // namespace effinfer::cuda
