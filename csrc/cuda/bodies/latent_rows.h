// Tokens of latent attention on their way into shared memory: a token's latent numbers, which are
// its key and its value, and behind them the rotated ones of its key.
//
// A row there is chunks of 8 numbers, 16 bytes; chunk c of row r lies at place c ^ r % 8, as those
// of plain_rows.h, and numbers of 8 bits become chunks as they do there.
#pragma once

#include <cstdint>

#include "cuda/bodies/plain_rows.h"
#include "cuda/unit.h"
#include "ops/attention.h"
#include "ops/latent_tile.h"

namespace effinfer::cuda {

inline constexpr int kLatentDims = 512;
inline constexpr int kLatentRopeDims = 64;
inline constexpr int kLatentChunks = (kLatentDims + kLatentRopeDims) / 8;  // of a row
inline constexpr int kLatentTokens = 32;                                   // of a stage
inline constexpr int kLatentStages = 3;
inline constexpr int kLatentWarps = 8;
inline constexpr int kLatentRows = ops::kGpuLatentRows;  // of a tile: queries

struct LatentStage {
  Quad rows[kLatentTokens][kLatentChunks];
  int32_t token[kLatentTokens];     // -1: there is none
  int64_t mask_bit[kLatentTokens];  // from a row's first one
};

// Chunks of both parts; products read pairs of them, so that behind the last one come zeros.
EFFINFER_DEVICE int latent_chunks(const ops::AttentionProblem& p) {
  return (p.k.dims + p.k_rope.dims + 15) / 16 * 2;
}

// Of a stage's tokens that a warp fetches, a lane's own: where it lies.
struct LatentPlace {
  int32_t token = -1;
  int32_t page = 0;
  int32_t slot = 0;
};

struct LatentRows {
  static constexpr int kOwn = kLatentTokens / kLatentWarps;  // tokens of a warp

  // Of stage `stage` of the tile's sequence, or of its list; -1: of none.
  template <class Unit>
  EFFINFER_DEVICE static LatentPlace find(Unit& unit, const ops::AttentionProblem& p,
                                          const ops::AttentionTile& tile, int32_t stage) {
    LatentPlace place;
    const int32_t index = stage * kLatentTokens + unit.warp * kOwn + unit.lane % kOwn;
    if (stage < 0 || index >= tile.num_tokens) return place;
    place.token = index;
    if (tile.first_span >= 0) {
      const ops::TokenSpan& span = listed_span(unit, p, tile, index);
      place.token += unit.load(&span.begin) - unit.load(&span.first);
    }
    const int32_t begin = p.batch.kv_indptr[tile.sequence];
    if (p.batch.kv_indices == nullptr) {
      place.slot = begin + place.token;
    } else {
      place.page = unit.load(p.batch.kv_indices + begin + place.token / p.page_size);
      place.slot = place.token % p.page_size;
    }
    return place;
  }

  // Both parts of the tile's rows, zeros for those that are not there.
  template <class Unit>
  EFFINFER_DEVICE static void fetch_queries(Unit& unit, const ops::AttentionProblem& p,
                                            const ops::AttentionTile& tile,
                                            Quad (&to)[kLatentRows][kLatentChunks]) {
    const int chunks = latent_chunks(p);
    for (int i = unit.thread; i < kLatentRows * chunks; i += kLatentWarps * kWarp) {
      const int row = i / chunks;
      const int chunk = i % chunks;
      const bool rotated = chunk * 8 >= p.q.dims;
      const ops::QueryRows& rows = rotated ? p.q_rope : p.q;
      const int dim = chunk * 8 - (rotated ? p.q.dims : 0);
      const bool valid = row < tile.num_rows * tile.num_heads && dim < rows.dims;
      const auto* from = reinterpret_cast<const uint16_t*>(valid ? rows.data : p.q.data);
      if (valid) {
        from += (tile.first_row + row / tile.num_heads) * rows.row_stride +
                (tile.first_head + row % tile.num_heads) * rows.head_stride + dim;
      }
      unit.copy_async(&to[row][swizzled(row, chunk)], from, valid);
    }
  }

  // The warp's tokens; zeros for those that are not there.
  template <class Unit>
  EFFINFER_DEVICE static void fetch(Unit& unit, const ops::AttentionProblem& p, int kv_head,
                                    const LatentPlace& place, LatentStage& to) {
    const int first = unit.warp * kOwn;
    if (unit.lane < kOwn) to.token[first + unit.lane] = place.token;
    const int chunks = latent_chunks(p);
    const int piece = chunks_of_piece(p);
    // The products' sums need the registers.
    EFFINFER_NO_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int32_t token = unit.shfl(place.token, i);
      const int32_t page = unit.shfl(place.page, i);
      const int32_t slot = unit.shfl(place.slot, i);
      EFFINFER_NO_UNROLL
      for (int chunk = unit.lane * piece; chunk < chunks; chunk += kWarp * piece) {
        const bool rotated = chunk * 8 >= p.k.dims;
        const ops::KvRows& rows = rotated ? p.k_rope : p.k;
        const int from_dim = chunk * 8 - (rotated ? p.k.dims : 0);
        const bool valid = token >= 0 && from_dim < rows.dims;
        const uint8_t* from = rows.data + kv_head * rows.head_stride;
        if (valid)
          from += page * rows.page_stride + slot * rows.token_stride + from_dim * 2 / piece;
        const int row = first + i;
        unit.copy_async(&to.rows[row][swizzled(row, chunk)], valid ? from : p.k.data, valid);
      }
    }
  }

  // Of the warp's tokens of stage `stage`.
  template <class Unit>
  EFFINFER_DEVICE static void set_mask_bits(Unit& unit, const ops::AttentionProblem& p,
                                            const ops::AttentionTile& tile, int32_t stage,
                                            LatentStage& to) {
    const int own = unit.warp * kOwn + unit.lane;
    const int32_t index = stage * kLatentTokens + own;
    if (unit.lane >= kOwn || index >= tile.num_tokens) return;
    int64_t bit = index;
    if (tile.first_span >= 0) {
      const ops::TokenSpan& span = listed_span(unit, p, tile, index);
      bit += unit.load(&span.mask_bit) - unit.load(&span.first);
    }
    to.mask_bit[own] = bit;
  }

  // What fetch() brought of 8-bit numbers, once the thread has waited for it.
  template <DType kType, class Unit>
  EFFINFER_DEVICE static void widen(Unit& unit, const ops::AttentionProblem& p, LatentStage& to) {
    const int chunks = latent_chunks(p);
    const NarrowNumbers<kType> numbers(p.k.dtype);
    EFFINFER_NO_UNROLL
    for (int row = unit.warp * kOwn; row < (unit.warp + 1) * kOwn; ++row) {
      EFFINFER_NO_UNROLL
      for (int chunk = unit.lane * 2; chunk < chunks; chunk += kWarp * 2) {
        Quad& first = to.rows[row][swizzled(row, chunk)];
        const Quad narrow = first;
        numbers.widen(unit, narrow, first, to.rows[row][swizzled(row, chunk + 1)]);
      }
    }
  }

 private:
  // That has token `index` of the tile's list.
  template <class Unit>
  EFFINFER_DEVICE static const ops::TokenSpan& listed_span(Unit& unit,
                                                           const ops::AttentionProblem& p,
                                                           const ops::AttentionTile& tile,
                                                           int32_t index) {
    const ops::TokenSpan* spans = p.work.spans + tile.first_span;
    return spans[span_of(unit, spans, tile.num_spans, index)];
  }

  // That come as 16 bytes.
  EFFINFER_DEVICE static int chunks_of_piece(const ops::AttentionProblem& p) {
    return is_narrow(p.k.dtype) ? 2 : 1;
  }
};

}  // namespace effinfer::cuda
