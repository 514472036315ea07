// Scores of pages for a block of query rows: softmax over cells of rows and keys, summed by page.
//
// Means: a cell is all rows of a head and a page; the mean of the products is the product of the
// mean query with the keys, averaged.
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

#include "cpu/prefill_index.h"
#include "cpu/vectors/attention_math.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv>
struct BlockIndexBody {
  using Math = AttentionMath<Kv>;
  using V = typename Kv::V;
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

  static void run_means(const BlockTile& tile) {
    const int64_t dim = tile.keys.head_dim;
    float* queries = tile.scratch;
    float* products = queries + tile.group * dim;  // [group][64]
    const V factor = V::set(tile.sm_scale / static_cast<float>(tile.num_rows));
    for (int64_t head = 0; head < tile.group; ++head) {
      for (int64_t d = 0; d < dim; d += 16) {
        V sum = V::set(0.0f);
        for (int64_t row = 0; row < tile.num_rows; ++row) {
          sum = sum + V::load(tile.q + row * tile.q_stride + head * dim + d);
        }
        (sum * factor).store(queries + head * dim + d);
      }
    }
    const int64_t k_lines = dim / P;
    for (int64_t page = 0; page < tile.num_pages; ++page) {
      const int64_t page_id = tile.keys.pages[page];
      const int64_t count = visible(tile, page);
      const uint64_t seen = token_bits(0, count);
      const uint8_t* k = tile.keys.k + page_id * tile.keys.page_bytes;
      Math::product_all(queries, dim, {k, kLine, k_lines * kLine, k}, dim, nullptr, products, kPage,
                        (count + 15) / 16, tile.group);
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

  struct Cells {
    int64_t dim;
    int64_t row_cells;  // of a head
    int64_t rows;       // of all heads
    int64_t kinds;
    float* queries;   // [rows][kinds][dim][16]
    float* products;  // [rows][64]
    float* maxima;    // [rows][pages]
    float* sums;      // [rows][pages]: of exponentials below the page's maximum
  };

  static Cells make_cells(const BlockTile& tile) {
    Cells c;
    c.dim = tile.keys.head_dim;
    c.row_cells = (tile.num_rows + tile.stride - 1) / tile.stride;
    c.rows = c.row_cells * tile.group;
    c.kinds = line_kinds(tile.stride);
    c.queries = tile.scratch;
    c.products = c.queries + c.rows * c.kinds * c.dim * 16;
    c.maxima = c.products + c.rows * kPage;
    c.sums = c.maxima + c.rows * tile.num_pages;
    return c;
  }

  // Rows behind the block are zeros.
  static void load_queries(const BlockTile& tile, const Cells& c) {
    const float factor = tile.sm_scale / static_cast<float>(tile.stride);
    for (int64_t cell = 0; cell < c.rows; ++cell) {
      const int64_t head = cell / c.row_cells;
      const int64_t last = (cell % c.row_cells + 1) * tile.stride - 1;
      for (int64_t lane = 0; lane < c.kinds * 16; ++lane) {
        const int64_t row = last - lane % tile.stride;
        const float* from = tile.q + row * tile.q_stride + head * c.dim;
        float* to = c.queries + (cell * c.kinds + lane / 16) * c.dim * 16 + lane % 16;
        for (int64_t d = 0; d < c.dim; ++d) {
          to[d * 16] = row < tile.num_rows ? from[d] * factor : 0.0f;
        }
      }
    }
  }

  // Products of R cells of rows with N lines of 16 keys, the lines `stride` bytes apart.
  template <int R, int N>
  static void multiply(const float* const (&queries)[R], const uint8_t* line, int64_t stride,
                       int64_t dim, float* out) {
    V sums[R][N];
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) sums[r][n] = V::set(0.0f);
    }
    for (int64_t d = 0; d < dim; d += P, line += kLine) {
      V keys[N][P];
      for (int n = 0; n < N; ++n) Kv::expand(line + n * stride, keys[n]);
      for (int j = 0; j < P; ++j) {
        for (int r = 0; r < R; ++r) {
          const V x = V::load(queries[r] + (d + j) * 16);
          for (int n = 0; n < N; ++n) sums[r][n] = fma(x, keys[n][j], sums[r][n]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) sums[r][n].store(out + r * kPage + n * 16);
    }
  }

  // Products of all cells of rows with the keys of a page.
  static void multiply_page(const Cells& c, const uint8_t* k) {
    constexpr int R = 4;
    constexpr int kWide = Kv::wide(R);
    const int64_t stride = c.dim / P * kLine;
    for (int64_t cell = 0; cell < c.rows; cell += R) {
      const auto queries = [&](int64_t r, int64_t kind) {
        const int64_t row = cell + r < c.rows ? cell + r : c.rows - 1;  // the last one again
        return c.queries + (row * c.kinds + kind) * c.dim * 16;
      };
      float* out = c.products + cell * kPage;
      if (c.kinds == 1 && cell + R <= c.rows) {
        const float* const rows[R] = {queries(0, 0), queries(1, 0), queries(2, 0), queries(3, 0)};
        for (int n = 0; n < 4; n += kWide) {
          multiply<R, kWide>(rows, k + n * stride, stride, c.dim, out + n * 16);
        }
        continue;
      }
      for (int64_t r = 0; r < R && cell + r < c.rows; ++r) {
        for (int n = 0; n < 4; ++n) {
          const float* const row[1] = {queries(r, n % c.kinds)};
          multiply<1, 1>(row, k + n * stride, stride, c.dim, out + r * kPage + n * 16);
        }
      }
    }
  }

  // The largest cell of a page and the sum of exponentials below it: of those that begin up to the
  // last row of the cell's.
  static void do_page(const BlockTile& tile, const Cells& c, int64_t page) {
    const int64_t page_id = tile.keys.pages[page];
    multiply_page(c, tile.keys.k + page_id * tile.keys.page_bytes);
    const int64_t page_cells = kPage / tile.stride;
    const int64_t count = visible(tile, page);
    const uint64_t seen = token_bits(0, count);
    alignas(64) float lanes[16];
    for (int64_t cell = 0; cell < c.rows; ++cell) {
      float* products = c.products + cell * kPage;
      for (int64_t t = 0; t < kPage; t += 16) {
        const V x = scaled(tile, page_id, t, V::load(products + t));
        Math::only(seen, t, x, 0.0f).store(products + t);
      }
      int64_t end = (cell % c.row_cells + 1) * tile.stride;
      if (end > tile.num_rows) end = tile.num_rows;
      const int64_t past = int64_t{tile.position} + end - page * kPage;
      for (int64_t i = 0; i < 16; ++i) {
        float sum = kNoScore;
        if (i < page_cells && i * tile.stride < past) {
          sum = 0.0f;
          for (int64_t j = 0; j < tile.stride; ++j) sum += products[i * tile.stride + j];
        }
        lanes[i] = sum;
      }
      const V cells = V::load(lanes);
      const float highest = maximum(max(V::set(kNoScore), cells));
      c.maxima[cell * tile.num_pages + page] = highest;
      const V shares = simd::exp(cells - V::set(highest));
      c.sums[cell * tile.num_pages + page] =
          past > 0 ? sum(Math::only((uint64_t{1} << page_cells) - 1, 0, shares, 0.0f)) : 0.0f;
    }
  }

  static void run_antidiagonals(const BlockTile& tile) {
    const Cells c = make_cells(tile);
    load_queries(tile, c);
    for (int64_t page = 0; page < tile.num_pages; ++page) do_page(tile, c, page);
    Math::fill(tile.scores, tile.group * tile.num_pages, 0.0f);
    for (int64_t cell = 0; cell < c.rows; ++cell) {
      const float* maxima = c.maxima + cell * tile.num_pages;
      float* sums = c.sums + cell * tile.num_pages;
      float highest = kNoScore;
      for (int64_t page = 0; page < tile.num_pages; ++page) {
        highest = maxima[page] > highest ? maxima[page] : highest;
      }
      float all = 0.0f;
      for (int64_t page = 0; page < tile.num_pages; ++page) {
        all += sums[page] *= Math::first_lane(simd::exp(V::set(maxima[page] - highest)));
      }
      float* scores = tile.scores + cell / c.row_cells * tile.num_pages;
      for (int64_t page = 0; page < tile.num_pages; ++page) scores[page] += sums[page] / all;
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

template <class F32, class F16, class Bf16, class I8>
void block_tile(const BlockTile& tile) {
  switch (tile.keys.dtype) {
    case DType::f32:
      return BlockIndexBody<F32>::run(tile);
    case DType::f16:
      return BlockIndexBody<F16>::run(tile);
    case DType::bf16:
      return BlockIndexBody<Bf16>::run(tile);
    default:
      return BlockIndexBody<I8>::run(tile);
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
