// What keys and distances get of the probabilities of some query rows: two passes over the pages,
// the first for each row's maximum and sum, the second for its probabilities. Both take the same
// exponentials, below the maximum of a lane's scores so far.
#pragma once

#include <cstdint>

#include "cpu/prefill_index.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/select.h"
#include "cpu/vectors/unroll.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv>
struct ColumnIndexBody {
  using Math = AttentionMath<Kv>;
  using V = typename Kv::V;
  static constexpr int64_t kLine = Math::kLine;
  static constexpr int kGroups = ops::kPageSize / 16;

  struct State {
    int64_t dim;
    float* q;       // [rows][dim], scaled
    float* scores;  // [rows][64]
    float* max;     // [rows][16], of each lane
    float* sum;     // [rows][16]: of exponentials below the lane's maximum
    float* so_far;  // [rows][16]: maxima up to a page, in the second pass
  };

  static State make_state(const ColumnTile& tile) {
    State s;
    s.dim = tile.keys.head_dim;
    s.q = tile.scratch;
    s.scores = s.q + kIndexRows * s.dim;
    s.max = s.scores + kIndexRows * ops::kPageSize;
    s.sum = s.max + kIndexRows * 16;
    s.so_far = s.sum + kIndexRows * 16;
    const V scale = V::set(tile.sm_scale);
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      for (int64_t d = 0; d < s.dim; d += 16) {
        Math::store_factor(V::load(tile.q[row] + d) * scale, s.q + row * s.dim, d);
      }
    }
    Math::fill(s.max, tile.num_rows * 16, kNoScore);
    Math::fill(s.sum, tile.num_rows * 16, 0.0f);
    Math::fill(s.so_far, tile.num_rows * 16, kNoScore);
    return s;
  }

  // Calls visit(row, scores, seen) for the rows that see tokens of the page.
  template <class Visit>
  static void for_rows(const ColumnTile& tile, const State& s, int64_t page, Visit&& visit) {
    const int64_t start = page * ops::kPageSize;
    int64_t first = 0;
    while (tile.positions[first] < start) ++first;
    constexpr int64_t kStride = ops::kPageSize;
    const int64_t past = tile.positions[tile.num_rows - 1] - start + 1;
    const int64_t groups = past >= ops::kPageSize ? kGroups : (past + 15) / 16;
    const int64_t k_lines = s.dim / Kv::P;  // of 16 tokens
    const uint8_t* k = tile.keys.k + tile.keys.pages[page] * tile.keys.page_bytes;
    Math::product_all(Math::factors_at(s.q + first * s.dim, 0), s.dim,
                      {k, kLine, k_lines * kLine, k}, s.dim, nullptr, s.scores + first * kStride,
                      kStride, groups, tile.num_rows - first);
    for (int64_t row = first; row < tile.num_rows; ++row) {
      visit(row, s.scores + row * kStride, token_bits(0, tile.positions[row] - start + 1));
    }
  }

  // The row's logits of a page; of tokens that it does not see, whose scores may be anything, minus
  // infinity.
  static void load_logits(const ColumnTile& tile, const float* scores, int64_t page, uint64_t seen,
                          V (&x)[kGroups]) {
    unroll<kGroups>([&](auto g) { x[g] = V::load(scores + g * 16); });
    if constexpr (Kv::kScaled) {
      const float* scales = tile.keys.k_scale + tile.keys.pages[page] * tile.keys.page_scales;
      unroll<kGroups>([&](auto g) { x[g] = x[g] * V::load(scales + g * 16); });
    }
    if (tile.noise != nullptr) {
      const float* noise = tile.noise + page * ops::kPageSize;
      const V scale = V::set(tile.noise_scale);
      unroll<kGroups>([&](auto g) { x[g] = fma(scale, V::load(noise + g * 16), x[g]); });
    }
    if (~seen == 0) return;
    unroll<kGroups>([&](auto g) { x[g] = Math::only(seen, g * 16, x[g], -__builtin_inff()); });
  }

  static V highest_of(V least, const V (&x)[kGroups]) {
    return max(least, max(max(x[0], x[1]), max(x[2], x[3])));
  }

  // A page's scores into the maxima and sums of a row's lanes. Most pages raise no maximum.
  static void add_scores(const ColumnTile& tile, const State& s, int64_t page, int64_t row,
                         const float* scores, uint64_t seen) {
    V x[kGroups];
    load_logits(tile, scores, page, seen, x);
    const V old = V::load(s.max + row * 16);
    const V highest = highest_of(old, x);
    V sums = V::load(s.sum + row * 16);
    if (bits_above(highest, old) != 0) {
      sums = sums * simd::exp(old - highest);
      highest.store(s.max + row * 16);
    }
    unroll<kGroups>([&](auto g) { x[g] = simd::exp(x[g] - highest); });
    sums = sums + ((x[0] + x[1]) + (x[2] + x[3]));
    sums.store(s.sum + row * 16);
  }

  // A row's lanes as one maximum and sum, in all of them: the sum as the factor of probabilities.
  static void join_lanes(const ColumnTile& tile, const State& s, int64_t row) {
    const V lanes = V::load(s.max + row * 16);
    const V highest = V::set(maximum(lanes));
    const float all = sum(V::load(s.sum + row * 16) * simd::exp(lanes - highest));
    highest.store(s.max + row * 16);
    V::set(tile.factors[row] / all).store(s.sum + row * 16);
  }

  // A row's probabilities to what keys and distances have.
  static void add_probabilities(const ColumnTile& tile, const State& s, int64_t page, int64_t row,
                                const float* scores, uint64_t seen) {
    V x[kGroups];
    load_logits(tile, scores, page, seen, x);
    const V highest = highest_of(V::load(s.so_far + row * 16), x);
    highest.store(s.so_far + row * 16);
    unroll<kGroups>([&](auto g) { x[g] = simd::exp(x[g] - highest); });
    const V factor = simd::exp(highest - V::load(s.max + row * 16)) * V::load(s.sum + row * 16);
    unroll<kGroups>([&](auto g) { x[g] = x[g] * factor; });
    add_to(tile, tile.columns + page * ops::kPageSize, x);
    if (tile.diagonals == nullptr) return;
    add_to(tile, tile.diagonals + page * ops::kPageSize + tile.last_position - tile.positions[row],
           x);
  }

  static void add_to(const ColumnTile& tile, float* sums, const V (&x)[kGroups]) {
    unroll<kGroups>([&](auto g) {
      const V old = V::load(sums + g * 16);
      (tile.maximum ? max(old, x[g]) : old + x[g]).store(sums + g * 16);
    });
  }

  static void run(const ColumnTile& tile) {
    const State s = make_state(tile);
    const int64_t pages = tile.positions[tile.num_rows - 1] / ops::kPageSize + 1;
    for (int64_t page = 0; page < pages; ++page) {
      for_rows(tile, s, page, [&](int64_t row, const float* scores, uint64_t seen) {
        add_scores(tile, s, page, row, scores, seen);
      });
    }
    for (int64_t row = 0; row < tile.num_rows; ++row) join_lanes(tile, s, row);
    for (int64_t page = 0; page < pages; ++page) {
      for_rows(tile, s, page, [&](int64_t row, const float* scores, uint64_t seen) {
        add_probabilities(tile, s, page, row, scores, seen);
      });
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
