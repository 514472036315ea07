// Coded pages of features (ops/page_features.h) and of numbers of vectors (ops/page_codebooks.h) as
// pages of keys and values: keys are turned by the places of their pages, all is rounded once.
//
// A block has 16 dims of the keys, or of the values, of a head of a page, a thread 8 of them of a
// token. Dims of keys are named so that both of a pair that is turned are neighbours.
#pragma once

#include <cstdint>

#include "cuda/bodies/decode_pages.h"
#include "cuda/unit.h"
#include "ops/page_codebooks.h"
#include "ops/page_features.h"

namespace effinfer::cuda {

struct ExpandPagesParams : DecodePagesParams {
  // Of which the problem has one, with the device's tables.
  ops::PageFeatures features;
  ops::PageCodebooks codebooks;
};

struct ExpandPages {
  static constexpr const char* kName = "expand_pages";
  static constexpr int kThreads = 2 * DecodedTile::kTokens;
  static constexpr int kMinBlocks = 5;
  using Params = ExpandPagesParams;
  using Shared = DecodedTile;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& tile) {
    const DecodedSlice slice(unit, p);
    if (slice.number < 0) return;
    const Own own = {unit.thread % DecodedTile::kTokens,
                     unit.thread / DecodedTile::kTokens * kDims};
    const bool has_books = p.coded.codebooks != nullptr;
    const ops::KeyTurns& turns = has_books ? p.codebooks.turns : p.features.turns;
    if (has_books) {
      read_vectors(unit, p, slice, own, tile);
    } else {
      add_features(unit, p, slice, own, turns, tile);
    }
    if (!slice.of_values) turn(unit, p, slice, own, turns, tile);
    EFFINFER_NO_UNROLL
    for (int i = 0; i < kDims; ++i) {
      const int at = own.first + i;
      slice.put(unit, p, dim_of(slice, turns, slice.first + at), own.token,
                tile.numbers[at][own.token]);
    }
  }

 private:
  static constexpr int kDims = DecodedTile::kDims / 2;  // of a thread

  struct Own {
    int token;
    int first;  // of the slice's dims in their order
  };

  EFFINFER_DEVICE static int dim_of(const DecodedSlice& slice, const ops::KeyTurns& turns, int at) {
    if (slice.of_values || at >= 2 * turns.num_pairs) return at;
    return at % 2 == 0 ? turns.first(at / 2) : turns.second(at / 2);
  }

  // These leave the thread's numbers in the tile.
  template <class Unit>
  EFFINFER_DEVICE static void read_vectors(Unit& unit, const Params& p, const DecodedSlice& slice,
                                           const Own& own, Shared& tile) {
    constexpr int kGroup = ops::PageCodebooks::kDims;
    constexpr int kVectors = ops::PageCodebooks::kVectors;
    const uint8_t* codes = slice.codes(p, slice.head);
    EFFINFER_NO_UNROLL
    for (int i = 0; i < kDims; ++i) {
      const int group = (slice.first + own.first + i) / kGroup;
      const int code = unit.load(codes + group * DecodedTile::kTokens + own.token);
      const int64_t book = p.codebooks.book(slice.head, group) * kGroup * kVectors;
      const int d = i % kGroup;
      const float* from = slice.of_values ? p.codebooks.values + book + code * kGroup + d
                                          : p.codebooks.keys + book + d * kVectors + code;
      tile.numbers[own.first + i][own.token] = unit.load(from);
    }
  }

  // 16 features at a time, which all threads decode.
  template <class Unit>
  EFFINFER_DEVICE static void add_features(Unit& unit, const Params& p, const DecodedSlice& slice,
                                           const Own& own, const ops::KeyTurns& turns,
                                           Shared& tile) {
    const float* basis = slice.of_values ? p.features.value_dims : p.features.key_dims;
    basis += int64_t{slice.head} * p.head_dim * p.features.count;
    int rows[kDims];
    float sums[kDims] = {};
    EFFINFER_UNROLL
    for (int i = 0; i < kDims; ++i) {
      rows[i] = dim_of(slice, turns, slice.first + own.first + i) * p.features.count;
    }
    EFFINFER_NO_UNROLL
    for (int part = 0; part < p.coded.num_kv_heads; ++part) {
      const CodedNumbers numbers(p, slice.codes(p, part), slice.of_values);
      EFFINFER_NO_UNROLL
      for (int first = 0; first < p.coded.head_dim; first += DecodedTile::kDims) {
        numbers.template fill<kThreads>(unit, first, tile);
        EFFINFER_NO_UNROLL
        for (int f = 0; f < DecodedTile::kDims; ++f, ++basis) {
          const float x = tile.numbers[f][own.token];
          EFFINFER_UNROLL
          for (int i = 0; i < kDims; ++i) sums[i] += unit.load(basis + rows[i]) * x;
        }
        unit.sync();
      }
    }
    EFFINFER_UNROLL
    for (int i = 0; i < kDims; ++i) tile.numbers[own.first + i][own.token] = sums[i];
  }

  // As cpu/vectors/page_turn.h has it.
  template <class Unit>
  EFFINFER_DEVICE static void turn(Unit& unit, const Params& p, const DecodedSlice& slice,
                                   const Own& own, const ops::KeyTurns& turns, Shared& tile) {
    const uint8_t* behind = p.codes(slice.number, 0, true) + p.value_bytes - ops::CodedPages::kRow;
    const auto place = unit.load(reinterpret_cast<const uint32_t*>(behind));
    // A place is read out of a page, and pages may come from anywhere.
    const auto most = static_cast<uint32_t>(turns.num_places - 1);
    const int64_t angles = int64_t{place < most ? place : most} * turns.num_pairs;
    EFFINFER_NO_UNROLL
    for (int i = own.first; i < own.first + kDims; i += 2) {
      const int pair = (slice.first + i) / 2;
      if (pair >= turns.num_pairs) break;
      const int at = pair * DecodedTile::kTokens + own.token;
      const float c = unit.load(turns.place_cos + angles + pair);
      const float s = unit.load(turns.place_sin + angles + pair);
      const float token_cos = unit.load(turns.token_cos + at);
      const float token_sin = unit.load(turns.token_sin + at);
      const float cos = c * token_cos - s * token_sin;
      const float sin = s * token_cos + c * token_sin;
      float& x = tile.numbers[i][own.token];
      float& y = tile.numbers[i + 1][own.token];
      const float turned = x * cos - y * sin;
      y = x * sin + y * cos;
      x = turned;
    }
  }
};

}  // namespace effinfer::cuda
