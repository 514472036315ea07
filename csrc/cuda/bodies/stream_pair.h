// stream_matmul.h for the two weights of a GLU whose formats differ: half of a block's warps
// multiply 32 rows of the one, the others those of the other, each with the inner loop of its
// format.
#pragma once

#include "cuda/bodies/stream_block.h"
#include "cuda/bodies/stream_formats.h"

namespace effinfer::cuda {

struct PairParams {
  StreamParams stream;        // parts[0] has the units and slices of both
  TensorMap second_map = {};  // boxes of pieces of the second format
  ops::PackedFormat formats[2];
  int64_t header_bytes[2] = {};
};

template <int kMostTokens>
struct StreamPair {
  static constexpr const char* kName = "stream_pair";
  static constexpr int kThreads = kStreamWarps * kWarp;
  static constexpr int kMinBlocks = 1;
  static constexpr bool kAdapts = true;
  static constexpr int kTokens = kMostTokens;
  static constexpr int kTiles = tiles_of(kTokens);
  static constexpr int kHalf = kStreamWarps / 2;
  using Params = PairParams;
  using Shared = StreamShared;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const int most = p.stream.block_tokens;
    const int first_token = unit.block % p.stream.token_blocks * most;
    const int left = p.stream.tokens - first_token;
    const int count = left < most ? left : most;
    const int index = unit.block / p.stream.token_blocks;
    multiply(unit, p, index, first_token, count, shared);
    unit.sync();
    finish(unit, p.stream, index, first_token, count, shared);
  }

 private:
  EFFINFER_DEVICE static StreamRow* sums_in(uint8_t* memory) {
    return reinterpret_cast<StreamRow*>(memory + kBarrierBytes);
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, int index, int first_token,
                                       int count, Shared& shared) {
    const int half = unit.warp / kHalf;
    const int slice = unit.warp % kHalf;
    const int slice_bits = p.stream.parts[0].slice_bits;
    if (slice >> slice_bits != 0) return;
    const int first = p.stream.superblocks * slice >> slice_bits;
    const int last = p.stream.superblocks * (slice + 1) >> slice_bits;
    const MatmulWeight& weight = p.stream.parts[half].weight;
    const uint8_t* const group = row_group(weight, 2 * index);
    const RowGroups groups = {group, row_group(weight, 2 * index + 1) - group};
    // Formats may differ in their places, so that each warp has tokens of its own.
    uint8_t* const own = shared.warp(p.stream, unit.warp);
    const StreamMemory memory = {own, shared.tokens(p.stream, unit.warp), own, {0, 1, 0}};
    const TensorMap* const map = half == 0 ? &p.stream.x_map : &p.second_map;
    if (unit.has_bulk_copies()) init_barriers(unit, own);
    with_stream_format(p.formats[half], [&]<ops::PackedFormat kFormat>() {
      using Product = StreamProduct<kFormat, kTokens>;
      typename Product::Sums sums = {};
      Product::run(unit, p.stream, groups, p.header_bytes[half], {first_token, count, map}, first,
                   last, memory, sums);
      unit.sync_warp();
      sums.store(unit, count, sums_in(own));
    });
  }

  template <class Unit>
  EFFINFER_DEVICE static void finish(Unit& unit, const StreamParams& p, int index, int first_token,
                                     int count, Shared& shared) {
    const StreamPart& part = p.parts[0];
    const auto of = [&](int warp, int token, int row) {
      return sums_in(shared.warp(p, warp))[token][row];
    };
    EFFINFER_NO_UNROLL
    for (int i = unit.thread; i < count * kStreamRows; i += kThreads) {
      const int token = i / kStreamRows;
      const int row = i % kStreamRows;
      if (index * kStreamRows + row >= part.weight.rows) continue;
      float sum = of(0, token, row);
      float second = of(kHalf, token, row);
      for (int s = 1; s < 1 << part.slice_bits; ++s) {
        sum += of(s, token, row);
        second += of(kHalf + s, token, row);
      }
      finish_output(unit, part.weight, p.parts[1].weight, p.glu, p.operand, first_token + token,
                    index * kStreamRows + row, sum, second);
    }
    if (index + 1 == part.units) {
      pad_operand(unit, p.operand, part.weight.rows, first_token, first_token + count, unit.thread,
                  kThreads);
    }
  }
};

}  // namespace effinfer::cuda
