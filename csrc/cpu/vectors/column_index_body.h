// What keys and distances get of the probabilities of some query rows: two passes over the pages,
// the first for each row's maximum and sum, the second for its probabilities.
#pragma once

#include <cstdint>

#include "cpu/prefill_index.h"
#include "cpu/vectors/attention_math.h"

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
    float* max;     // [rows]
    float* sum;
    float* factor;
  };

  static State make_state(const ColumnTile& tile) {
    State s;
    s.dim = tile.keys.head_dim;
    s.q = tile.scratch;
    s.scores = s.q + kIndexRows * s.dim;
    s.max = s.scores + kIndexRows * ops::kPageSize;
    s.sum = s.max + kIndexRows;
    s.factor = s.sum + kIndexRows;
    const V scale = V::set(tile.sm_scale);
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      for (int64_t d = 0; d < s.dim; d += 16) {
        Math::store_factor(V::load(tile.q[row] + d) * scale, s.q + row * s.dim, d);
      }
    }
    Math::fill(s.max, tile.num_rows, kNoScore);
    Math::fill(s.sum, tile.num_rows, 0.0f);
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

  static void run(const ColumnTile& tile) {
    const State s = make_state(tile);
    const int64_t pages = tile.positions[tile.num_rows - 1] / ops::kPageSize + 1;
    for (int64_t page = 0; page < pages; ++page) {
      const int64_t page_id = tile.keys.pages[page];
      for_rows(tile, s, page, [&](int64_t row, int64_t end, uint64_t seen) {
        Math::softmax_row(
            s.scores + row * ops::kPageSize, {0, end}, seen, s.max[row], s.sum[row], s.factor[row],
            [&](V x, int64_t t) { return scaled(tile, page_id, t, x); },
            [](V p, int64_t) { return p; });
      });
    }
    for (int64_t page = 0; page < pages; ++page) {
      for_rows(tile, s, page, [&](int64_t row, int64_t end, uint64_t seen) {
        add_row(tile, s, page, row, end, seen);
      });
    }
  }

  static void add_row(const ColumnTile& tile, const State& s, int64_t page, int64_t row,
                      int64_t end, uint64_t seen) {
    const int64_t page_id = tile.keys.pages[page];
    const float* scores = s.scores + row * ops::kPageSize;
    float* columns = tile.columns + page * ops::kPageSize;
    float* diagonals = tile.diagonals == nullptr ? nullptr
                                                 : tile.diagonals + page * ops::kPageSize +
                                                       tile.last_position - tile.positions[row];
    const V highest = V::set(s.max[row]);
    const V factor = V::set(1.0f / s.sum[row]);
    for (int64_t t = 0; t < end; t += 16) {
      const V x = scaled(tile, page_id, t, V::load(scores + t));
      const V p = simd::exp(Math::only(seen, t, x, -__builtin_inff()) - highest) * factor;
      (V::load(columns + t) + p).store(columns + t);
      if (diagonals != nullptr) (V::load(diagonals + t) + p).store(diagonals + t);
    }
  }
};

template <class F32, class F16, class Bf16, class I8>
void column_tile(const ColumnTile& tile) {
  switch (tile.keys.dtype) {
    case DType::f32:
      return ColumnIndexBody<F32>::run(tile);
    case DType::f16:
      return ColumnIndexBody<F16>::run(tile);
    case DType::bf16:
      return ColumnIndexBody<Bf16>::run(tile);
    default:
      return ColumnIndexBody<I8>::run(tile);
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
