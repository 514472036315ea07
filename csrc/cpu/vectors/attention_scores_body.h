// What a few units of keys get of the attention of all rows of a sequence: the kernel of every ISA
// level.
//
// The units are gathered once into the order of the products (vectors/list_gather.h). Then a tile
// of query rows after the other is multiplied with each of them, and the probabilities of a head's
// rows are summed in registers before they are added to what the keys have.
#pragma once

#include <cstdint>

#include "cpu/attention_scores.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/list_attention_body.h"
#include "cpu/vectors/list_gather.h"

namespace effinfer::cpu::simd {

template <class Kv, class Pack>
struct AttentionScoresBody {
  using Math = AttentionMath<Kv>;
  using Gather = ListGather<Kv, Pack>;
  using Body = ListAttentionBody<Kv, Pack>;
  using V = typename Kv::V;
  static constexpr int P = Kv::P;
  static constexpr int64_t kLine = Math::kLine;
  static constexpr int64_t kUnit = ops::kUnitTokens;
  static constexpr int64_t kGroups = kUnit / 16;

  struct State {
    int64_t dim;     // a multiple of 16
    float* keys;     // [4][64][dim]
    float* q;        // [tile rows][dim]
    float* scores;   // [tile rows][64]
    float* lse;      // [tile rows]
    int32_t* begin;  // [rows]: the keys that they see
    int32_t* end;
    float* row;
    typename Gather::Buffers buffers;
  };

  static State make_state(const ListAttentionTile& list) {
    State s;
    s.dim = round_up_16(list.k.dims);
    const int64_t tokens = scores_tile_rows(list.num_heads);
    const int64_t rows = tokens * list.num_heads;
    auto* next = reinterpret_cast<float*>(list.scratch);
    const auto take = [&](int64_t count) {
      float* taken = next;
      next += (count + 15) / 16 * 16;
      return taken;
    };
    s.keys = take(ops::kChunkUnits * kUnit * s.dim);
    s.q = take(rows * s.dim);
    s.scores = take(rows * kUnit);
    s.row = take(s.dim);
    s.buffers.rows = reinterpret_cast<uint8_t*>(take(16 * s.dim));
    float* zeros = take(s.dim);
    Math::fill(zeros, s.dim, 0.0f);
    s.buffers.zeros = reinterpret_cast<uint8_t*>(zeros);
    s.buffers.values = reinterpret_cast<uint8_t*>(zeros);  // there are none
    s.lse = take(rows);
    s.begin = reinterpret_cast<int32_t*>(take(tokens));
    s.end = reinterpret_cast<int32_t*>(take(tokens));
    return s;
  }

  static uint8_t* keys_of(const State& s, int64_t unit) {
    return reinterpret_cast<uint8_t*>(s.keys) + unit * kUnit * s.dim * Gather::kElement;
  }

  // What rows [first, first + count) see; whether any of it is in keys [begin, end).
  static bool find_limits(const AttentionScoresTile& tile, const State& s, int64_t first,
                          int64_t count, int64_t begin, int64_t end) {
    const ListAttentionTile& list = tile.list;
    bool any = false;
    for (int64_t row = 0; row < count; ++row) {
      const int64_t position =
          tile.positions != nullptr ? tile.positions[first + row] : list.position + first + row;
      int64_t from = list.window_left >= 0 ? position - list.window_left : 0;
      int64_t to = list.causal && position + 1 < list.num_tokens ? position + 1 : list.num_tokens;
      if (from < begin) from = begin;
      if (to > end) to = end;
      any |= from < to;
      s.begin[row] = static_cast<int32_t>(from);
      s.end[row] = static_cast<int32_t>(to);
    }
    return any;
  }

  static void load_queries(const AttentionScoresTile& tile, const State& s, int64_t first,
                           int64_t count) {
    const ListAttentionTile& list = tile.list;
    const ops::QueryRows& q = list.q;
    const int64_t size = q.dtype == DType::f32 ? 4 : 2;
    Math::fill(s.row, s.dim, 0.0f);
    for (int64_t row = 0; row < count * list.num_heads; ++row) {
      const int64_t token = first + row / list.num_heads;
      const int64_t head = row % list.num_heads;
      Body::to_floats(q.data + (token * q.row_stride + head * q.head_stride) * size, q.dtype,
                      q.dims, s.row);
      for (int64_t d = 0; d < s.dim; d += 16) {
        Math::store_factor(V::load(s.row + d), s.q + row * s.dim, d);
      }
      s.lse[row] = tile.lse[token * tile.lse_row_stride + head];
    }
  }

  // Adds `count` values of keys from `key` on to what the block of rows has.
  template <bool kMaximum>
  static void flush(const AttentionScoresTile& tile, const V (&sums)[kGroups], int64_t head,
                    int64_t block, int64_t key, int64_t count) {
    float* out = tile.out + head * tile.head_stride + block * tile.block_stride;
    const auto join = [](auto a, auto b) __attribute__((always_inline)) {
      if constexpr (kMaximum)
        return a < b ? b : a;
      else
        return a + b;
    };
    for (int64_t t = 0; t < count; t += 16) {
      if (tile.key_block == 1 && t + 16 <= count) {
        const V old = V::load(out + key + t);
        (kMaximum ? max(old, sums[t / 16]) : old + sums[t / 16]).store(out + key + t);
        continue;
      }
      float lanes[16];
      sums[t / 16].store(lanes);
      for (int64_t i = 0; i < 16 && t + i < count; ++i) {
        float& cell = out[(key + t + i) / tile.key_block];
        cell = join(cell, lanes[i]);
      }
    }
  }

  // A row's probabilities of a unit's keys, joined to those of the rows before.
  template <bool kMaximum>
  [[gnu::always_inline]] static void add_row(const ListAttentionTile& list, const ListUnit& unit,
                                             const float* scores, float lse, uint64_t seen,
                                             V (&sums)[kGroups], float* diagonal) {
    const V scale = V::set(list.sm_scale);
    for (int64_t g = 0; g < kGroups; ++g) {
      const int64_t t = 16 * g;
      if ((seen >> t & 0xffff) == 0) continue;
      V x = V::load(scores + t) * scale;
      if (list.k.scales != nullptr) x = x * V::load(unit.k_scales + t);
      if (list.soft_cap > 0.0f) {
        const V cap = V::set(list.soft_cap);
        x = tanh(x / cap) * cap;
      }
      const V p = Math::only(seen, t, exp(x - V::set(lse)), 0.0f);
      sums[g] = kMaximum ? max(sums[g], p) : sums[g] + p;
      if (diagonal == nullptr) continue;
      float lanes[16];
      p.store(lanes);
      for (int64_t i = 0; i < 16 && t + i < unit.count; ++i) diagonal[t + i] += lanes[i];
    }
  }

  // A unit's scores of rows [first, first + count) into what its keys have.
  template <bool kMaximum>
  static void add_unit(const AttentionScoresTile& tile, const State& s, const ListUnit& unit,
                       int64_t first, int64_t count, int64_t key) {
    const ListAttentionTile& list = tile.list;
    const int64_t chunk = int64_t{list.first_unit} * kUnit;
    const int64_t all = int64_t{list.end_unit} * kUnit;
    const int64_t width = (all < list.num_tokens ? all : list.num_tokens) - chunk;
    const int64_t block = tile.row_block > 0 ? tile.row_block : int64_t{1} << 62;
    const int64_t phase = (list.position % block + block) % block;
    for (int64_t head = 0; head < list.num_heads; ++head) {
      float* diagonals = tile.diagonals;
      if (diagonals != nullptr) diagonals += head * (width + list.num_rows - 1) + key - chunk;
      for (int64_t row = 0; row < count;) {
        const int64_t at = (phase + first + row) / block;
        const int64_t end = (at + 1) * block - phase - first;
        V sums[kGroups];
        for (V& x : sums) x = V::set(0.0f);
        for (; row < count && row < end; ++row) {
          const int64_t i = row * list.num_heads + head;
          const uint64_t seen = Math::token_bits(s.begin[row] - key, s.end[row] - key);
          if (seen == 0 || s.lse[i] == -__builtin_inff()) continue;
          float* diagonal =
              diagonals == nullptr ? nullptr : diagonals + list.num_rows - 1 - first - row;
          add_row<kMaximum>(list, unit, s.scores + i * kUnit, s.lse[i], seen, sums, diagonal);
        }
        flush<kMaximum>(tile, sums, head, at, key, unit.count);
      }
    }
  }

  static void add_rows(const AttentionScoresTile& tile, const State& s, const ListUnit* units,
                       int64_t first, int64_t count) {
    const ListAttentionTile& list = tile.list;
    const int64_t lines = s.dim / P;  // of 16 keys
    for (int32_t unit = 0; unit < list.end_unit - list.first_unit; ++unit) {
      const int64_t key = (int64_t{list.first_unit} + unit) * kUnit;
      bool any = false;
      for (int64_t row = 0; row < count; ++row) {
        any |= Math::token_bits(s.begin[row] - key, s.end[row] - key) != 0;
      }
      if (!any) continue;
      const uint8_t* k = keys_of(s, unit);
      Math::product_all(Math::factors_at(s.q, 0), s.dim, {k, kLine, lines * kLine, k}, s.dim,
                        nullptr, s.scores, kUnit, (units[unit].count + 15) / 16,
                        count * list.num_heads);
      if (tile.maximum) {
        add_unit<true>(tile, s, units[unit], first, count, key);
      } else {
        add_unit<false>(tile, s, units[unit], first, count, key);
      }
    }
  }

  static void run(const AttentionScoresTile& tile) {
    const ListAttentionTile& list = tile.list;
    State s = make_state(list);
    ListUnit units[ops::kChunkUnits + 1];
    ListWalk walk(list, s.buffers.zeros);
    walk.next(units[0]);
    const int32_t count = list.end_unit - list.first_unit;
    for (int32_t unit = 0; unit < count; ++unit) {
      walk.next(units[unit + 1]);
      s.buffers.keys = keys_of(s, unit);
      Gather::pack_keys(list, units[unit], units[unit + 1], s.buffers);
    }
    const int64_t begin = int64_t{list.first_unit} * kUnit;
    const int64_t end = int64_t{list.end_unit} * kUnit;
    const int64_t step = scores_tile_rows(list.num_heads);
    for (int64_t first = 0; first < list.num_rows; first += step) {
      const int64_t rows = list.num_rows - first < step ? list.num_rows - first : step;
      if (!find_limits(tile, s, first, rows, begin, end)) continue;
      load_queries(tile, s, first, rows);
      add_rows(tile, s, units, first, rows);
    }
  }
};

template <class F32, class F16, class Bf16, class Pack>
void attention_scores_tile(const AttentionScoresTile& tile) {
  switch (tile.list.k.dtype) {
    case DType::f32:
      return AttentionScoresBody<F32, Pack>::run(tile);
    case DType::f16:
      return AttentionScoresBody<F16, Pack>::run(tile);
    default:
      return AttentionScoresBody<Bf16, Pack>::run(tile);
  }
}

}  // namespace effinfer::cpu::simd
