// What a few units of keys get of the attention of all rows of a sequence: the kernel of every ISA
// level.
//
// The units are gathered once into the order of the products, or lie in it. Then a tile of query
// rows after the other is multiplied with each of them, and the probabilities of a head's rows are
// summed in registers before they are added to what the keys have.
#pragma once

#include <cstdint>

#include "cpu/attention_scores.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/key_rows.h"
#include "cpu/vectors/query_rows.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// A unit of keys in the order of the products.
struct ScoreUnit {
  const uint8_t* keys;
  const float* scales;  // null: none
  int32_t count;
};

// The engine's pages, as they lie.
struct ScorePages {
  static void load(const AttentionTask& task, float*, int64_t, ScoreUnit* units) {
    for (int32_t unit = task.first_unit; unit < task.end_unit; ++unit, ++units) {
      const int64_t id = task.pages[unit];
      const int64_t left = task.num_tokens - unit * kUnit;
      units->keys = task.k.data + id * task.k.page_stride;
      units->scales =
          task.k.scales == nullptr ? nullptr : task.k.scales + id * task.k.scale_page_stride;
      units->count = static_cast<int32_t>(left < kUnit ? left : kUnit);
    }
  }
};

// Rows of a caller, gathered into `memory`.
template <class Kv, class Pack>
struct ScoreRows {
  using Gather = RowGather<Kv, Pack>;
  static void load(const AttentionTask& task, float* memory, int64_t dim, ScoreUnit* units) {
    const int64_t count = task.end_unit - task.first_unit;
    const int64_t bytes = kUnit * dim * Gather::kElement;  // of a unit
    auto* keys = reinterpret_cast<uint8_t*>(memory);
    float* scales = memory + ops::kChunkUnits * kUnit * dim;
    float* zeros = scales + ops::kChunkUnits * kUnit;
    AttentionMath<Kv>::fill(zeros, dim + 16, 0.0f);
    typename Gather::Buffers buffers = {};
    buffers.zeros = reinterpret_cast<uint8_t*>(zeros);
    buffers.rows = reinterpret_cast<uint8_t*>(zeros + dim + 16);
    RowUnit found[2];
    RowWalk walk(task, buffers.zeros);
    walk.next(found[0]);
    for (int64_t i = 0; i < count; ++i) {
      const RowUnit& unit = found[i % 2];
      walk.next(found[(i + 1) % 2]);
      buffers.keys = keys + i * bytes;
      Gather::pack_keys(task, unit, found[(i + 1) % 2], buffers);
      units[i] = {buffers.keys, nullptr, unit.count};
      if (task.k.scales == nullptr) continue;
      __builtin_memcpy(scales + i * kUnit, unit.k_scales, sizeof(unit.k_scales));
      units[i].scales = scales + i * kUnit;
    }
  }
};

template <class Kv, class Keys>
struct AttentionScoresBody {
  using Math = AttentionMath<Kv>;
  using V = typename Kv::V;
  static constexpr int P = Kv::P;
  static constexpr int64_t kLine = Math::kLine;
  static constexpr int64_t kGroups = kUnit / 16;

  struct State {
    int64_t dim;     // a multiple of 16
    float* q;        // [tile rows][dim]
    float* scores;   // [tile rows][64]
    float* lse;      // [tile rows]
    int32_t* begin;  // [rows]: the keys that they see
    int32_t* end;
    float* row;
    float* keys;  // of Keys
  };

  static State make_state(const AttentionTask& list) {
    State s;
    s.dim = round_up_16(list.k.dims);
    const int64_t tokens = scores_tile_rows(list.num_heads);
    const int64_t rows = tokens * list.num_heads;
    auto* next = reinterpret_cast<float*>(list.scratch);
    const auto take = [&](int64_t count) {
      float* taken = next;
      next += round_up_16(count);
      return taken;
    };
    s.q = take(rows * s.dim);
    s.scores = take(rows * kUnit);
    s.row = take(s.dim);
    s.lse = take(rows);
    s.begin = reinterpret_cast<int32_t*>(take(tokens));
    s.end = reinterpret_cast<int32_t*>(take(tokens));
    s.keys = next;
    return s;
  }

  // What rows [first, first + count) see; whether any of it is in keys [begin, end).
  static bool find_limits(const ScoresTask& task, const State& s, int64_t first, int64_t count,
                          int64_t begin, int64_t end) {
    const AttentionTask& list = task.keys;
    bool any = false;
    for (int64_t row = 0; row < count; ++row) {
      const int64_t position =
          task.positions != nullptr ? task.positions[first + row] : list.position + first + row;
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

  static void load_rows(const ScoresTask& task, const State& s, int64_t first, int64_t count) {
    const int64_t heads = task.keys.num_heads;
    load_queries<Kv>(task.keys, task.keys.q, first * heads, count * heads, s.dim, s.row, s.q);
    for (int64_t row = 0; row < count * heads; ++row) {
      s.lse[row] = task.lse[(first + row / heads) * task.lse_row_stride + row % heads];
    }
  }

  // Adds `count` values of keys from `key` on to what the block of rows has.
  template <bool kMaximum>
  static void flush(const ScoresTask& task, const V (&sums)[kGroups], int64_t head, int64_t block,
                    int64_t key, int64_t count) {
    float* out = task.out + head * task.head_stride + block * task.block_stride;
    const auto join = [](auto a, auto b) __attribute__((always_inline)) {
      if constexpr (kMaximum)
        return a < b ? b : a;
      else
        return a + b;
    };
    for (int64_t t = 0; t < count; t += 16) {
      if (task.key_block == 1 && t + 16 <= count) {
        const V old = V::load(out + key + t);
        (kMaximum ? max(old, sums[t / 16]) : old + sums[t / 16]).store(out + key + t);
        continue;
      }
      float lanes[16];
      sums[t / 16].store(lanes);
      for (int64_t i = 0; i < 16 && t + i < count; ++i) {
        float& cell = out[(key + t + i) / task.key_block];
        cell = join(cell, lanes[i]);
      }
    }
  }

  // A row's probabilities of a unit's keys, joined to those of the rows before.
  template <bool kMaximum>
  [[gnu::always_inline]] static void add_row(const AttentionTask& list, const ScoreUnit& unit,
                                             const float* scores, float lse, uint64_t seen,
                                             V (&sums)[kGroups], float* diagonal) {
    const V scale = V::set(list.score_scale);
    for (int64_t g = 0; g < kGroups; ++g) {
      const int64_t t = 16 * g;
      if ((seen >> t & 0xffff) == 0) continue;
      V x = V::load(scores + t) * scale;
      if (unit.scales != nullptr) x = x * V::load(unit.scales + t);
      if (list.soft_cap > 0.0f) {
        const V cap = V::set(list.soft_cap);
        x = simd::tanh(x / cap) * cap;
      }
      const V p = Math::only(seen, t, simd::exp(x - V::set(lse)), 0.0f);
      sums[g] = kMaximum ? max(sums[g], p) : sums[g] + p;
      if (diagonal == nullptr) continue;
      float lanes[16];
      p.store(lanes);
      for (int64_t i = 0; i < 16 && t + i < unit.count; ++i) diagonal[t + i] += lanes[i];
    }
  }

  // A unit's scores of rows [first, first + count) into what its keys have.
  template <bool kMaximum>
  static void add_unit(const ScoresTask& task, const State& s, const ScoreUnit& unit, int64_t first,
                       int64_t count, int64_t key) {
    const AttentionTask& list = task.keys;
    const int64_t chunk = int64_t{list.first_unit} * kUnit;
    const int64_t all = int64_t{list.end_unit} * kUnit;
    const int64_t width = (all < list.num_tokens ? all : list.num_tokens) - chunk;
    const int64_t block = task.row_block > 0 ? task.row_block : int64_t{1} << 62;
    const int64_t phase = (list.position % block + block) % block;
    for (int64_t head = 0; head < list.num_heads; ++head) {
      float* diagonals = task.diagonals;
      if (diagonals != nullptr) diagonals += head * (width + list.num_rows - 1) + key - chunk;
      for (int64_t row = 0; row < count;) {
        const int64_t at = (phase + first + row) / block;
        const int64_t end = (at + 1) * block - phase - first;
        V sums[kGroups];
        for (V& x : sums) x = V::set(0.0f);
        for (; row < count && row < end; ++row) {
          const int64_t i = row * list.num_heads + head;
          const uint64_t seen = token_bits(s.begin[row] - key, s.end[row] - key);
          if (seen == 0 || s.lse[i] == -__builtin_inff()) continue;
          float* diagonal =
              diagonals == nullptr ? nullptr : diagonals + list.num_rows - 1 - first - row;
          add_row<kMaximum>(list, unit, s.scores + i * kUnit, s.lse[i], seen, sums, diagonal);
        }
        flush<kMaximum>(task, sums, head, at, key, unit.count);
      }
    }
  }

  static void add_rows(const ScoresTask& task, const State& s, const ScoreUnit* units,
                       int64_t first, int64_t count) {
    const AttentionTask& list = task.keys;
    const int64_t lines = s.dim / P;  // of 16 keys
    for (int32_t unit = 0; unit < list.end_unit - list.first_unit; ++unit) {
      const int64_t key = (int64_t{list.first_unit} + unit) * kUnit;
      bool any = false;
      for (int64_t row = 0; row < count; ++row) {
        any |= token_bits(s.begin[row] - key, s.end[row] - key) != 0;
      }
      if (!any) continue;
      const uint8_t* k = units[unit].keys;
      Math::product_all(Math::factors_at(s.q, 0), s.dim, {k, kLine, lines * kLine, k}, s.dim,
                        nullptr, s.scores, kUnit, (units[unit].count + 15) / 16,
                        count * list.num_heads);
      if (task.maximum) {
        add_unit<true>(task, s, units[unit], first, count, key);
      } else {
        add_unit<false>(task, s, units[unit], first, count, key);
      }
    }
  }

  static void run(const ScoresTask& task) {
    const AttentionTask& list = task.keys;
    const State s = make_state(list);
    ScoreUnit units[ops::kChunkUnits];
    Keys::load(list, s.keys, s.dim, units);
    const int64_t begin = int64_t{list.first_unit} * kUnit;
    const int64_t end = int64_t{list.end_unit} * kUnit;
    const int64_t step = scores_tile_rows(list.num_heads);
    for (int64_t first = 0; first < list.num_rows; first += step) {
      const int64_t rows = list.num_rows - first < step ? list.num_rows - first : step;
      if (!find_limits(task, s, first, rows, begin, end)) continue;
      load_rows(task, s, first, rows);
      add_rows(task, s, units, first, rows);
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
