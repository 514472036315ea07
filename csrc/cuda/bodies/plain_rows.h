// Keys and values as a caller has them, rows of 16- or 8-bit numbers in pages of any size and
// layout or one after the other, on their way into shared memory.
//
// A warp holds up to 64 tokens, each in a row of kDims numbers there. A row is chunks of 8 numbers,
// 16 bytes; chunk c of row r lies at place c ^ r % 8, so that the 8 rows of which ldmatrix takes a
// chunk at once lie in different banks. 16 numbers of 8 bits come to the place of the first of
// their two chunks, and become both when they are there: by the thread that copied them, before the
// others are told.
#pragma once

#include <cstdint>

#include "cuda/bodies/narrow_numbers.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kPlainRows = 16;                 // of a tile: those of mma's operands
inline constexpr int kPlainUnits = ops::kChunkUnits;  // of a chunk, at once
inline constexpr int kPlainUnit = ops::kUnitTokens;

EFFINFER_DEVICE int swizzled(int row, int chunk) {
  return chunk ^ (row & 7);
}

// Where two tokens of a unit lie: the lane's own, and the one 32 on; -1: they are not there.
struct TokenPlaces {
  int32_t page[2] = {-1, -1};
  int32_t slot[2] = {};
  int32_t span[2] = {};  // of the tile's list, if it has one
};

// Tokens of a list, and the bits of a mask that are theirs in its first row.
struct ListTokens {
  int32_t token[kPlainUnit];
  int64_t mask_bit[kPlainUnit];
};

// The span of a tile's list that has token `place` of the list.
template <class Unit>
EFFINFER_DEVICE int32_t span_of(Unit& unit, const ops::TokenSpan* spans, int32_t num_spans,
                                int32_t place) {
  int32_t low = 0;
  int32_t high = num_spans;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (unit.load(&spans[middle].first) <= place) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <int kDims>
struct PlainRows {
  static constexpr int kChunks = kDims / 8;
  // Tokens whose keys, and whose values, are in shared memory at once.
  static constexpr int kStage = kDims <= 128 ? kPlainUnit : kPlainUnit / 2;
  static constexpr int kStages = kPlainUnit / kStage;
  using Stage = Quad[kStage][kChunks];
  // Warps of a unit: of more than 128 dims each has half of the values' dims, for which one would
  // have too few registers. They share the unit's memory, and fetch half of its rows each.
  static constexpr int kSplit = kDims <= 128 ? 1 : 2;
  static constexpr int kWarps = kPlainUnits * kSplit;

  // Chunks that products of 16 dims read: what lies behind the last dim is zeros.
  EFFINFER_DEVICE static int read_chunks(int dims) { return (dims + 15) / 16 * 2; }

  // Of a unit of the tile's sequence; `visited`: whether there is such a unit.
  template <class Unit>
  EFFINFER_DEVICE static TokenPlaces find(Unit& unit, const ops::AttentionLogits& p,
                                          const ops::TokenSpan* all_spans,
                                          const ops::AttentionTile& tile, int index, bool visited) {
    TokenPlaces places;
    const int32_t begin = p.batch.kv_indptr[tile.sequence];
    EFFINFER_UNROLL
    for (int half = 0; half < 2; ++half) {
      int32_t token = index * kPlainUnit + half * kWarp + unit.lane;
      if (!visited || token >= tile.num_tokens) continue;
      if (tile.first_span >= 0) {
        const ops::TokenSpan* spans = all_spans + tile.first_span;
        places.span[half] = span_of(unit, spans, tile.num_spans, token);
        const ops::TokenSpan& span = spans[places.span[half]];
        token += unit.load(&span.begin) - unit.load(&span.first);
      }
      if (p.batch.kv_indices == nullptr) {
        places.page[half] = 0;
        places.slot[half] = begin + token;
      } else {
        places.page[half] = unit.load(p.batch.kv_indices + begin + token / p.page_size);
        places.slot[half] = token % p.page_size;
      }
    }
    return places;
  }

  // What the lane's own tokens' numbers are multiplied by, where rows say it.
  template <class Unit>
  EFFINFER_DEVICE static void find_scales(Unit& unit, const ops::KvRows& rows, int kv_head,
                                          const TokenPlaces& places, float (&scales)[2]) {
    if (rows.scales == nullptr) return;
    EFFINFER_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (places.page[half] < 0) continue;
      scales[half] =
          unit.load(rows.scales + places.page[half] * rows.scale_page_stride +
                    places.slot[half] * rows.scale_token_stride + kv_head * rows.scale_head_stride);
    }
  }

  // Of a tile with a list: the tokens of a unit, whose places are known.
  template <class Unit>
  EFFINFER_DEVICE static void store_tokens(Unit& unit, const ops::AttentionProblem& p,
                                           const ops::AttentionTile& tile, int index,
                                           const TokenPlaces& places, ListTokens& to) {
    EFFINFER_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (places.page[half] < 0) continue;
      const int at = half * kWarp + unit.lane;
      const ops::TokenSpan& span = p.work.spans[tile.first_span + places.span[half]];
      const int32_t offset = index * kPlainUnit + at - unit.load(&span.first);
      to.token[at] = unit.load(&span.begin) + offset;
      to.mask_bit[at] = unit.load(&span.mask_bit) + offset;
    }
  }

  // The warp's rows of stage `stage` of a unit; zeros for tokens that are not there.
  template <class Unit>
  EFFINFER_DEVICE static void fetch(Unit& unit, const ops::KvRows& rows, int kv_head,
                                    const TokenPlaces& places, int stage, Stage& to) {
    const uint8_t* head = rows.data + kv_head * rows.head_stride;
    const OwnPieces own(unit, rows);
    EFFINFER_UNROLL
    for (int part = 0; part < kStage / kWarp; ++part) {
      const int half = stage * kStage / kWarp + part;
      const int32_t pages = places.page[half];
      const int32_t slots = places.slot[half];
      own.template each<4>([&](int row) {
        const int32_t page = unit.shfl(pages, row);
        const int32_t slot = unit.shfl(slots, row);
        if (!own.is_read) return;
        const bool valid = page >= 0 && own.chunk * 8 < rows.dims;
        const uint8_t* from = head;
        if (valid) from += page * rows.page_stride + slot * rows.token_stride + own.piece * 16;
        unit.copy_async(&to[part * kWarp + row][swizzled(row, own.chunk)], from, valid);
      });
    }
  }

  // What fetch() brought of 8-bit numbers, once the thread has waited for it.
  template <DType kType, class Unit>
  EFFINFER_DEVICE static void widen(Unit& unit, const ops::KvRows& rows, Stage& to) {
    const OwnPieces own(unit, rows);
    if (!own.is_read) return;
    const NarrowNumbers<kType> numbers(rows.dtype);
    EFFINFER_NO_UNROLL
    for (int part = 0; part < kStage / kWarp; ++part) {
      own.template each<1>([&](int i) {
        const int row = part * kWarp + i;
        Quad& first = to[row][swizzled(row, own.chunk)];
        const Quad narrow = first;
        numbers.widen(unit, narrow, first, to[row][swizzled(row, own.chunk + 1)]);
      });
    }
  }

 private:
  // The 16 bytes that a lane copies of each row that it has a part of.
  struct OwnPieces {
    template <class Unit>
    EFFINFER_DEVICE OwnPieces(Unit& unit, const ops::KvRows& rows) {
      const int chunks = is_narrow(rows.dtype) ? 2 : 1;  // of a piece
      const int pieces = kChunks / chunks;               // of a row
      piece = unit.lane % pieces;
      chunk = piece * chunks;
      is_read = chunk < read_chunks(rows.dims);
      step = kWarp / pieces;
      first = unit.warp / kPlainUnits * (kWarp / kSplit) + unit.lane / pieces;
    }
    // visit(row) with each of 32 rows, or of the half that the warp fetches; code for kAtOnce.
    template <int kAtOnce, class Visit>
    EFFINFER_DEVICE void each(Visit&& visit) const {
      EFFINFER_NO_UNROLL
      for (int i = 0; i < kWarp / kSplit; i += kAtOnce * step) {
        EFFINFER_UNROLL
        for (int j = 0; j < kAtOnce; ++j) visit(first + i + j * step);
      }
    }

    int piece;
    int chunk;
    bool is_read;
    int step;
    int first;
  };
};

}  // namespace effinfer::cuda
