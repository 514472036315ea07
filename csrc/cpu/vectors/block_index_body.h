// Scores of pages for a block of query rows: softmax over cells of rows and keys, summed by page.
//
// Means: a cell is all rows of a head and a page; the mean of the products is the product of the
// mean query with the keys, averaged. Of a probe query rows are weighted by how far they lie from
// their mean, in the dimensions of all heads.
//
// Antidiagonals: a cell is `stride` rows and keys, and its score the sum of the products on its
// antidiagonal. Each key of a cell multiplies another row, so what a line of 16 keys is multiplied
// by is not one number, but a vector of one dimension of 16 / stride times those rows, last first:
//
//                 keys 0   1   2   3            one line: dimension d of keys   0 1 2 3  4 5 6 7
//                 ...
//        row 0  [  .   .   .   x ]              times dimension d of rows       3 2 1 0  3 2 1 0
//        ... row 1  [  .   .   x   . ] row 2  [  .   x   .   . ]              summed over d: a
//        product of each key, of which the row 3  [  x   .   .   . ]              `stride` of a
//        cell are added
#pragma once

#include <cstdint>
#include <limits>

#include "cpu/prefill_index.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/kv_pack.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv>
struct BlockIndexBody {
  using Math = AttentionMath<Kv>;
  using V = typename Kv::V;
  using A = typename Math::A;
  static constexpr int P = Kv::P;
  static constexpr int64_t kLine = Math::kLine;
  static constexpr int64_t kPage = ops::kPageSize;

  static V scaled(const BlockTile& tile, int64_t page_id, int64_t t, V x) {
    if constexpr (!Kv::kScaled) return x;
    return x * V::load(tile.keys.k_scale + page_id * tile.keys.page_scales + t);
  }

  // Tokens of a page that the block's last row sees.
  static int64_t visible(const BlockTile& tile, int64_t page) {
    const int64_t left = int64_t{tile.position} + tile.num_rows - page * kPage;
    return left < kPage ? left : kPage;
  }

  // values[i] = exp(values[i] - maximum) / their sum.
  static void softmax(float* values, int64_t count) {
    float highest = kNoScore;
    for (int64_t i = 0; i < count; ++i) highest = values[i] > highest ? values[i] : highest;
    float sum = 0.0f;
    alignas(64) float lanes[16];
    for (int64_t i = 0; i < count; i += 16) {
      const int64_t n = count - i < 16 ? count - i : 16;
      for (int64_t j = 0; j < 16; ++j) lanes[j] = j < n ? values[i + j] : kNoScore;
      simd::exp(V::load(lanes) - V::set(highest)).store(lanes);
      for (int64_t j = 0; j < n; ++j) sum += values[i + j] = lanes[j];
    }
    for (int64_t i = 0; i < count; ++i) values[i] /= sum;
  }

  // centre[d]: the mean of number d of all rows; to[d]: one over the sum of their squared distances
  // from it, 0 where they are alike.
  static void add_spread(const BlockTile& tile, int64_t numbers, float* centre, float* to) {
    constexpr float kLeast = std::numeric_limits<float>::min();
    const V share = V::set(1.0f / static_cast<float>(tile.num_rows));
    for (int64_t d = 0; d < numbers; d += 16) {
      V mean = V::set(0.0f);
      for (int64_t row = 0; row < tile.num_rows; ++row) {
        mean = mean + V::load(tile.q + row * tile.q_stride + d);
      }
      mean = mean * share;
      mean.store(centre + d);
      V squares = V::set(0.0f);
      for (int64_t row = 0; row < tile.num_rows; ++row) {
        const V from = V::load(tile.q + row * tile.q_stride + d) - mean;
        squares = fma(from, from, squares);
      }
      squares.store(to + d);
    }
    for (int64_t d = 0; d < numbers; ++d) to[d] = to[d] > kLeast ? 1.0f / to[d] : 0.0f;
  }

  // Shares of 1 by how far rows lie from their mean.
  static void weigh_rows(const BlockTile& tile, float* centre, float* weights) {
    const int64_t numbers = tile.group * tile.keys.head_dim;
    float* const spread = centre + numbers;
    add_spread(tile, numbers, centre, spread);
    float all = 0.0f;
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      V squares = V::set(0.0f);
      for (int64_t d = 0; d < numbers; d += 16) {
        const V from = V::load(tile.q + row * tile.q_stride + d) - V::load(centre + d);
        squares = fma(from * from, V::load(spread + d), squares);
      }
      all += weights[row] = sum(squares);
    }
    const float equal = 1.0f / static_cast<float>(tile.num_rows);
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      weights[row] = all == 0.0f ? equal : weights[row] / all;
    }
  }

  // The query of each head, with its scale.
  static void mean_queries(const BlockTile& tile, float* queries) {
    const int64_t dim = tile.keys.head_dim;
    const V factor = V::set(tile.sm_scale / static_cast<float>(tile.num_rows));
    for (int64_t head = 0; head < tile.group; ++head) {
      for (int64_t d = 0; d < dim; d += 16) {
        V sum = V::set(0.0f);
        for (int64_t row = 0; row < tile.num_rows; ++row) {
          sum = sum + V::load(tile.q + row * tile.q_stride + head * dim + d);
        }
        Math::store_factor(sum * factor, queries + head * dim, d);
      }
    }
  }
  static void probe_queries(const BlockTile& tile, const float* weights, float* queries) {
    const int64_t dim = tile.keys.head_dim;
    const V factor = V::set(tile.sm_scale);
    for (int64_t head = 0; head < tile.group; ++head) {
      for (int64_t d = 0; d < dim; d += 16) {
        V sum = V::set(0.0f);
        for (int64_t row = 0; row < tile.num_rows; ++row) {
          const V x = V::load(tile.q + row * tile.q_stride + head * dim + d);
          sum = fma(x, V::set(weights[row]), sum);
        }
        Math::store_factor(sum * factor, queries + head * dim, d);
      }
    }
  }

  static void run_means(const BlockTile& tile) {
    const int64_t dim = tile.keys.head_dim;
    float* queries = tile.scratch;                 // [group][dim]
    float* products = queries + tile.group * dim;  // [group][64]
    if (tile.probe) {
      float* centre = products + tile.group * kPage;   // [group][dim], and as many spreads
      float* weights = centre + 2 * tile.group * dim;  // [num_rows]
      weigh_rows(tile, centre, weights);
      probe_queries(tile, weights, queries);
    } else {
      mean_queries(tile, queries);
    }
    const int64_t k_lines = dim / P;
    for (int64_t page = 0; page < tile.num_pages; ++page) {
      const int64_t page_id = tile.keys.pages[page];
      const int64_t count = visible(tile, page);
      const uint64_t seen = token_bits(0, count);
      const uint8_t* k = tile.keys.k + page_id * tile.keys.page_bytes;
      Math::product_all(Math::factors_at(queries, 0), dim, {k, kLine, k_lines * kLine, k}, dim,
                        nullptr, products, kPage, (count + 15) / 16, tile.group);
      for (int64_t head = 0; head < tile.group; ++head) {
        V sums = V::set(0.0f);
        for (int64_t t = 0; t < count; t += 16) {
          const V x = scaled(tile, page_id, t, V::load(products + head * kPage + t));
          sums = sums + Math::only(seen, t, x, 0.0f);
        }
        tile.scores[head * tile.num_pages + page] = sum(sums) / static_cast<float>(count);
      }
    }
    for (int64_t head = 0; head < tile.group; ++head) {
      softmax(tile.scores + head * tile.num_pages, tile.num_pages);
    }
  }

  // Vectors of queries that different lines of 16 keys need.
  static int64_t line_kinds(int64_t stride) { return stride <= 16 ? 1 : stride / 16; }

  static constexpr int kRows = kIndexCellRows;

  struct Cells {
    int64_t dim;
    int64_t dwords;      // of a row of queries
    int64_t head_rows;   // rows of cells of a head
    int64_t rows;        // of all heads
    int64_t kinds;       // of lines
    int64_t page_cells;  // of a row
    int64_t length;      // of a row of cells, a multiple of 16
    float* scaled;       // [group * num_rows + 1][dim]: queries, and zeros
    A* queries;          // [rows][kinds][dwords][16]
    float* products;     // [kRows][64]
    float* halves;       // [kRows][32]
    float* cells;        // [rows][length]
  };

  static Cells make_cells(const BlockTile& tile) {
    Cells c;
    c.dim = tile.keys.head_dim;
    c.dwords = Kv::kPairs ? c.dim / 2 : c.dim;
    c.head_rows = (tile.num_rows + tile.stride - 1) / tile.stride;
    c.rows = c.head_rows * tile.group;
    c.kinds = line_kinds(tile.stride);
    c.page_cells = kPage / tile.stride;
    c.length = (tile.num_pages * c.page_cells + 15) / 16 * 16;
    c.products = tile.scratch;
    c.halves = c.products + kRows * kPage;
    c.scaled = c.halves + kRows * kPage / 2;
    c.queries = reinterpret_cast<A*>(c.scaled + (tile.group * tile.num_rows + 1) * c.dim);
    c.cells = reinterpret_cast<float*>(c.queries + c.rows * c.kinds * c.dwords * 16);
    return c;
  }

  // Rows behind the block are zeros.
  static void load_queries(const BlockTile& tile, const Cells& c) {
    const V factor = V::set(tile.sm_scale / static_cast<float>(tile.stride));
    float* const zeros = c.scaled + tile.group * tile.num_rows * c.dim;
    Math::fill(zeros, c.dim, 0.0f);
    for (int64_t head = 0; head < tile.group; ++head) {
      for (int64_t row = 0; row < tile.num_rows; ++row) {
        const float* from = tile.q + row * tile.q_stride + head * c.dim;
        float* to = c.scaled + (head * tile.num_rows + row) * c.dim;
        for (int64_t d = 0; d < c.dim; d += 16)
          Math::store_factor(V::load(from + d) * factor, to, d);
      }
    }
    for (int64_t cell = 0; cell < c.rows; ++cell) {
      const int64_t first = cell / c.head_rows * tile.num_rows;
      const int64_t last = (cell % c.head_rows + 1) * tile.stride - 1;
      for (int64_t kind = 0; kind < c.kinds; ++kind) {
        const uint8_t* lanes[16];
        for (int64_t lane = 0; lane < 16; ++lane) {
          const int64_t row = last - (kind * 16 + lane) % tile.stride;
          const float* from = row < tile.num_rows ? c.scaled + (first + row) * c.dim : zeros;
          lanes[lane] = reinterpret_cast<const uint8_t*>(from);
        }
        A* to = c.queries + (cell * c.kinds + kind) * c.dwords * 16;
        KvPack::transpose(lanes, 0, c.dwords, reinterpret_cast<uint8_t*>(to));
      }
    }
  }

  // Products of kRows rows of cells with N lines of 16 keys, the lines `stride` bytes apart.
  template <int N>
  static void multiply(const A* const (&queries)[kRows], const uint8_t* line, int64_t stride,
                       int64_t dim, float* out) {
    V sums[kRows][N];
    for (int r = 0; r < kRows; ++r) {
      for (int n = 0; n < N; ++n) sums[r][n] = V::set(0.0f);
    }
    for (int64_t d = 0; d < dim; d += P, line += kLine) {
      if constexpr (Kv::kPairs) {
        typename Kv::Line keys[N];
        for (int n = 0; n < N; ++n) keys[n] = Kv::load(line + n * stride, P);
        for (int r = 0; r < kRows; ++r) {
          const auto x = Kv::load(reinterpret_cast<const uint8_t*>(queries[r] + d / P * 16), P);
          for (int n = 0; n < N; ++n) sums[r][n] = Kv::add_products(sums[r][n], keys[n], x);
        }
      } else {
        V keys[N][P];
        for (int n = 0; n < N; ++n) Kv::expand(line + n * stride, keys[n]);
        for (int j = 0; j < P; ++j) {
          for (int r = 0; r < kRows; ++r) {
            const V x = V::load(queries[r] + (d + j) * 16);
            for (int n = 0; n < N; ++n) sums[r][n] = fma(x, keys[n][j], sums[r][n]);
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int n = 0; n < N; ++n) sums[r][n].store(out + r * kPage + n * 16);
    }
  }

  // Products of kRows rows of cells from `cell` on with the keys of a page; of those behind the
  // last one that one's again.
  static void multiply_page(const Cells& c, int64_t cell, const uint8_t* k) {
    constexpr int kWide = Kv::wide(kRows);
    const int64_t stride = c.dim / P * kLine;
    for (int64_t kind = 0; kind < c.kinds; ++kind) {
      const A* queries[kRows];
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t row = cell + r < c.rows ? cell + r : c.rows - 1;
        queries[r] = c.queries + (row * c.kinds + kind) * c.dwords * 16;
      }
      if (c.kinds == 1) {
        for (int64_t n = 0; n < kPage / 16; n += kWide) {
          multiply<kWide>(queries, k + n * stride, stride, c.dim, c.products + n * 16);
        }
      } else {
        for (int64_t n = kind; n < kPage / 16; n += c.kinds) {
          multiply<1>(queries, k + n * stride, stride, c.dim, c.products + n * 16);
        }
      }
    }
  }

  // to[i] = from[2 i] + from[2 i + 1]
  static void add_neighbours(const float* __restrict from, float* __restrict to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[2 * i] + from[2 * i + 1];
  }

  // The cells of a page.
  static void do_page(const BlockTile& tile, const Cells& c, int64_t page) {
    const int64_t page_id = tile.keys.pages[page];
    const uint64_t seen = token_bits(0, visible(tile, page));
    for (int64_t cell = 0; cell < c.rows; cell += kRows) {
      multiply_page(c, cell, tile.keys.k + page_id * tile.keys.page_bytes);
      if (Kv::kScaled || seen != ~uint64_t{0}) {
        for (int64_t t = 0; t < kRows * kPage; t += 16) {
          const V x = scaled(tile, page_id, t % kPage, V::load(c.products + t));
          Math::only(seen, t % kPage, x, 0.0f).store(c.products + t);
        }
      }
      float* sums = c.products;
      float* next = c.halves;
      for (int64_t count = kRows * kPage / 2; count >= kRows * c.page_cells; count /= 2) {
        add_neighbours(sums, next, count);
        float* const added = next;
        next = sums;
        sums = added;
      }
      for (int64_t r = 0; r < kRows && cell + r < c.rows; ++r) {
        float* to = c.cells + (cell + r) * c.length + page * c.page_cells;
        for (int64_t i = 0; i < c.page_cells; ++i) to[i] = sums[r * c.page_cells + i];
      }
    }
  }

  // A row's cells to shares of their sum: of those that begin up to the row's last token.
  static void share_cells(float* cells, int64_t seen, int64_t length) {
    for (int64_t i = seen; i < length; ++i) cells[i] = kNoScore;
    V highest = V::set(kNoScore);
    for (int64_t i = 0; i < length; i += 16) highest = max(highest, V::load(cells + i));
    const V most = V::set(maximum(highest));
    V sums = V::set(0.0f);
    for (int64_t i = 0; i < length; i += 16) {
      const V x = simd::exp(V::load(cells + i) - most);
      sums = sums + x;
      x.store(cells + i);
    }
    const V share = V::set(1.0f / sum(sums));
    for (int64_t i = 0; i < length; i += 16) (V::load(cells + i) * share).store(cells + i);
  }

  static void run_antidiagonals(const BlockTile& tile) {
    const Cells c = make_cells(tile);
    load_queries(tile, c);
    for (int64_t page = 0; page < tile.num_pages; ++page) do_page(tile, c, page);
    for (int64_t head = 0; head < tile.group; ++head) {
      float* const all = c.cells + head * c.head_rows * c.length;  // the first row's, of all rows
      for (int64_t row = 0; row < c.head_rows; ++row) {
        float* cells = all + row * c.length;
        const int64_t end = (row + 1) * tile.stride;
        const int64_t past = tile.position + (end < tile.num_rows ? end : tile.num_rows);
        share_cells(cells, (past + tile.stride - 1) / tile.stride, c.length);
        if (row == 0) continue;
        for (int64_t i = 0; i < c.length; i += 16) {
          (V::load(all + i) + V::load(cells + i)).store(all + i);
        }
      }
      float* scores = tile.scores + head * tile.num_pages;
      for (int64_t page = 0; page < tile.num_pages; ++page) {
        scores[page] = 0.0f;
        for (int64_t i = 0; i < c.page_cells; ++i) scores[page] += all[page * c.page_cells + i];
      }
    }
  }

  static void run(const BlockTile& tile) {
    if (tile.stride == 0) {
      run_means(tile);
    } else {
      run_antidiagonals(tile);
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
