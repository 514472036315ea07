// stream_matmul.h for the two weights of a GLU whose formats differ: half of a block's warps
// multiply 32 rows of the one, the others those of the other, each with the inner loop of its
// format.
#pragma once

#include "cuda/bodies/stream_block.h"
#include "cuda/bodies/stream_formats.h"

namespace effinfer::cuda {

struct PairParams {
  StreamParams stream;  // parts[0] has the units and slices of both
  ops::PackedFormat formats[2];
  int64_t header_bytes[2] = {};
};

template <int kTiles>
struct StreamPair {
  static constexpr const char* kName = "stream_pair";
  static constexpr int kThreads = kStreamWarps * kWarp;
  static constexpr int kMinBlocks = 1;
  static constexpr int kTokens = kTiles * kTileTokens;
  static constexpr int kHalf = kStreamWarps / 2;
  static constexpr int kAhead = 40;
  using Params = PairParams;
  struct Shared {
    StreamMemory<kTiles> warps[kStreamWarps];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const int first_token = unit.block % p.stream.token_blocks * kTokens;
    const int left = p.stream.tokens - first_token;
    const int count = left < kTokens ? left : kTokens;
    const int index = unit.block / p.stream.token_blocks;
    multiply(unit, p, index, first_token, count, shared.warps[unit.warp]);
    unit.sync();
    finish(unit, p.stream, index, first_token, count, shared);
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Params& p, int index, int first_token,
                                       int count, StreamMemory<kTiles>& memory) {
    const int half = unit.warp / kHalf;
    const int slice = unit.warp % kHalf;
    const int slice_bits = p.stream.parts[0].slice_bits;
    if (slice >> slice_bits != 0) return;
    const int first = p.stream.superblocks * slice >> slice_bits;
    const int last = p.stream.superblocks * (slice + 1) >> slice_bits;
    const GroupPlace group = group_place(p.stream.parts[half].weight, 2 * index + unit.lane / 16,
                                         p.header_bytes[half], unit.lane);
    StreamSums<kTiles> sums = {};
    with_stream_format(p.formats[half], [&]<ops::PackedFormat kFormat>() {
      StreamProduct<kFormat, kTiles, kAhead>::run(unit, p.stream, group,
                                                  p.stream.x + first_token * p.stream.x_row_bytes,
                                                  count, first, last, memory.tokens, sums);
    });
    unit.sync_warp();
    store_sums(unit, sums, memory.sums);
  }

  template <class Unit>
  EFFINFER_DEVICE static void finish(Unit& unit, const StreamParams& p, int index, int first_token,
                                     int count, const Shared& shared) {
    const StreamPart& part = p.parts[0];
    EFFINFER_NO_UNROLL
    for (int i = unit.thread; i < count * kStreamRows; i += kThreads) {
      const int token = i / kStreamRows;
      const int row = i % kStreamRows;
      if (index * kStreamRows + row >= part.weight.rows) continue;
      float sum = shared.warps[0].sums[token][row];
      float second = shared.warps[kHalf].sums[token][row];
      for (int s = 1; s < 1 << part.slice_bits; ++s) {
        sum += shared.warps[s].sums[token][row];
        second += shared.warps[kHalf + s].sums[token][row];
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
