// What keys and distances get of the probabilities of some query rows: two passes over the pages,
// the first for each row's maximum and sum, the second for its probabilities.
#pragma once

#include <cstdint>

#include "cpu/prefill_index.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/select.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv>
struct ColumnIndexBody {
  using Math = AttentionMath<Kv>;
  using V = typename Kv::V;
  static constexpr int64_t kLine = Math::kLine;

  struct State {
    int64_t dim;
    float* q;       // [rows][dim], scaled
    float* scores;  // [rows][64]
    float* max;     // [rows][16], of each lane
    float* sum;     // [rows][16]: of exponentials below the lane's maximum
  };

  static State make_state(const ColumnTile& tile) {
    State s;
    s.dim = tile.keys.head_dim;
    s.q = tile.scratch;
    s.scores = s.q + kIndexRows * s.dim;
    s.max = s.scores + kIndexRows * ops::kPageSize;
    s.sum = s.max + kIndexRows * 16;
    const V scale = V::set(tile.sm_scale);
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      for (int64_t d = 0; d < s.dim; d += 16) {
        Math::store_factor(V::load(tile.q[row] + d) * scale, s.q + row * s.dim, d);
      }
    }
    Math::fill(s.max, tile.num_rows * 16, kNoScore);
    Math::fill(s.sum, tile.num_rows * 16, 0.0f);
    return s;
  }

  static V scaled(const ColumnTile& tile, int64_t page_id, int64_t t, V x) {
    if constexpr (!Kv::kScaled) return x;
    return x * V::load(tile.keys.k_scale + page_id * tile.keys.page_scales + t);
  }

  // Calls visit(row, end, seen) for the rows that see tokens of the page, of which the first `end`
  // have scores.
  template <class Visit>
  static void for_rows(const ColumnTile& tile, const State& s, int64_t page, Visit&& visit) {
    const int64_t start = page * ops::kPageSize;
    int64_t first = 0;
    while (tile.positions[first] < start) ++first;
    const int64_t past = tile.positions[tile.num_rows - 1] - start + 1;
    const int64_t groups = past >= ops::kPageSize ? 4 : (past + 15) / 16;
    const int64_t k_lines = s.dim / Kv::P;  // of 16 tokens
    const int64_t page_id = tile.keys.pages[page];
    const uint8_t* k = tile.keys.k + page_id * tile.keys.page_bytes;
    Math::product_all(
        Math::factors_at(s.q + first * s.dim, 0), s.dim, {k, kLine, k_lines * kLine, k}, s.dim,
        nullptr, s.scores + first * ops::kPageSize, ops::kPageSize, groups, tile.num_rows - first);
    for (int64_t row = first; row < tile.num_rows; ++row) {
      visit(row, groups * 16, token_bits(0, tile.positions[row] - start + 1));
    }
  }

  // The row's scores of 16 tokens; of those that it does not see minus infinity.
  static V score(const ColumnTile& tile, const float* scores, int64_t page, int64_t t,
                 uint64_t seen) {
    V x = scaled(tile, tile.keys.pages[page], t, V::load(scores + t));
    if (tile.noise != nullptr) {
      x = fma(V::set(tile.noise_scale), V::load(tile.noise + page * ops::kPageSize + t), x);
    }
    return Math::only(seen, t, x, -__builtin_inff());
  }

  // Scores into the maxima and sums of a row's lanes. Most pages raise no maximum.
  static void add_scores(const ColumnTile& tile, const State& s, int64_t page, int64_t row,
                         int64_t end, uint64_t seen) {
    const float* scores = s.scores + row * ops::kPageSize;
    const V old = V::load(s.max + row * 16);
    V highest = old;
    for (int64_t t = 0; t < end; t += 16)
      highest = max(highest, score(tile, scores, page, t, seen));
    V sums = V::load(s.sum + row * 16);
    if (bits_above(highest, old) != 0) {
      sums = sums * simd::exp(old - highest);
      highest.store(s.max + row * 16);
    }
    for (int64_t t = 0; t < end; t += 16) {
      sums = sums + simd::exp(score(tile, scores, page, t, seen) - highest);
    }
    sums.store(s.sum + row * 16);
  }

  // A row's lanes as one maximum and sum, in all of them: the sum as the factor of probabilities.
  static void join_lanes(const State& s, int64_t row) {
    const V lanes = V::load(s.max + row * 16);
    const V highest = V::set(maximum(lanes));
    const float all = sum(V::load(s.sum + row * 16) * simd::exp(lanes - highest));
    highest.store(s.max + row * 16);
    V::set(1.0f / all).store(s.sum + row * 16);
  }

  // A row's probabilities to what keys and distances have.
  static void add_probabilities(const ColumnTile& tile, const State& s, int64_t page, int64_t row,
                                int64_t end, uint64_t seen) {
    const float* scores = s.scores + row * ops::kPageSize;
    float* columns = tile.columns + page * ops::kPageSize;
    float* diagonals = tile.diagonals == nullptr ? nullptr
                                                 : tile.diagonals + page * ops::kPageSize +
                                                       tile.last_position - tile.positions[row];
    const V highest = V::load(s.max + row * 16);
    const V factor = V::load(s.sum + row * 16);
    for (int64_t t = 0; t < end; t += 16) {
      const V p = simd::exp(score(tile, scores, page, t, seen) - highest) * factor;
      (V::load(columns + t) + p).store(columns + t);
      if (diagonals != nullptr) (V::load(diagonals + t) + p).store(diagonals + t);
    }
  }

  static void run(const ColumnTile& tile) {
    const State s = make_state(tile);
    const int64_t pages = tile.positions[tile.num_rows - 1] / ops::kPageSize + 1;
    for (int64_t page = 0; page < pages; ++page) {
      for_rows(tile, s, page, [&](int64_t row, int64_t end, uint64_t seen) {
        add_scores(tile, s, page, row, end, seen);
      });
    }
    for (int64_t row = 0; row < tile.num_rows; ++row) join_lanes(s, row);
    for (int64_t page = 0; page < pages; ++page) {
      for_rows(tile, s, page, [&](int64_t row, int64_t end, uint64_t seen) {
        add_probabilities(tile, s, page, row, end, seen);
      });
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
