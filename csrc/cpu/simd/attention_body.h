// Attention of a tile of query rows over the pages of one KV head: the kernel of every ISA level.
//
// Kv is a level's view of one KV dtype (simd/kv_*.h): V, a vector of 16 floats; P, the elements in
// a dword; wide(rows), how many lines side by side fit the registers next to that many rows; and
//   expand(line, out)   the P vectors of a 64-byte line, which multiply floats, or with kPairs
//   load(line, count), add_products(sums, line, pair), store_pairs(values, to)
//                       lines of bfloat16 pairs as they are (`count` of them meant), which multiply
//                       queries and probabilities rounded to bfloat16, two in a dword.
//
// A page goes through three passes: scores (Q K^T), softmax, output (P V). The outer two are the
// same small matrix product, because both K and V lines are 16 columns x P steps of the inner
// dimension (kernels/kv_layout.h). Each result is one chain of multiply-adds in the order of the
// inner dimension, whatever the register tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/attention.h"
#include "cpu/simd/math.h"
#include "kernels/attention.h"

namespace effinfer::cpu::simd {

// The maximum of no scores: finite, so that differences of maxima are never NaN, and far below any
// score, so that exp() of the difference is 0.
inline constexpr float kNoScore = -1e30f;

template <class Kv>
struct AttentionBody {
  using V = typename Kv::V;
  using A = std::conditional_t<Kv::kPairs, uint32_t, float>;  // what lines are multiplied by
  static constexpr int P = Kv::P;
  static constexpr int64_t kLine = 64;

  // The right-hand side of a product: lines `step` bytes apart along the inner dimension and
  // `stride` bytes apart along the columns. `next` is the same part of the next page, which is
  // fetched line by line in the order of addresses, whatever the order of use: the hardware then
  // sees one stream and joins in.
  struct Lines {
    const uint8_t* data;
    int64_t step;
    int64_t stride;
    const uint8_t* next;
  };

  // c[R][16 N] = factors * c + a[R][depth] b, or a b without factors.
  template <int R, int N>
  static void product(const A* a, int64_t a_stride, const Lines& b, int64_t depth,
                      const float* factors, float* c, int64_t c_stride) {
    V sums[R][N];
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) {
        sums[r][n] = factors == nullptr ? V::set(0.0f)
                                        : V::load(c + r * c_stride + n * 16) * V::set(factors[r]);
      }
    }
    const uint8_t* line = b.data;
    const uint8_t* next = b.next;
    const auto step = [&](int count) __attribute__((always_inline)) {
      if constexpr (Kv::kPairs) {
        typename Kv::Line columns[N];
        for (int n = 0; n < N; ++n) {
          __builtin_prefetch(next + n * kLine, 0, 2);
          columns[n] = Kv::load(line + n * b.stride, count);
        }
        for (int r = 0; r < R; ++r) {
          const auto pair = Kv::broadcast(a[r * a_stride]);
          for (int n = 0; n < N; ++n) sums[r][n] = Kv::add_products(sums[r][n], columns[n], pair);
        }
        ++a;
      } else {
        V columns[N][P];
        for (int n = 0; n < N; ++n) {
          __builtin_prefetch(next + n * kLine, 0, 2);
          Kv::expand(line + n * b.stride, columns[n]);
        }
        for (int j = 0; j < P; ++j) {
          if (j >= count) break;
          for (int r = 0; r < R; ++r) {
            const V x = V::set(a[r * a_stride + j]);
            for (int n = 0; n < N; ++n) sums[r][n] = fma(x, columns[n][j], sums[r][n]);
          }
        }
        a += P;
      }
      line += b.step;
      next += N * kLine;
    };
    for (int64_t i = 0; i < depth / P; ++i) step(P);
    if (P > 1 && depth % P > 0) step(static_cast<int>(depth % P));
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) sums[r][n].store(c + r * c_stride + n * 16);
    }
  }

  // All columns (in lines of 16) of R rows.
  template <int R>
  static void product_rows(const A* a, int64_t a_stride, Lines b, int64_t depth,
                           const float* factors, float* c, int64_t c_stride, int64_t columns) {
    constexpr int N = Kv::wide(R);
    for (; columns >= N; columns -= N) {
      product<R, N>(a, a_stride, b, depth, factors, c, c_stride);
      b.data += N * b.stride;
      b.next += N * depth / P * kLine;
      c += N * 16;
    }
    for (; columns > 0; --columns) {
      product<R, 1>(a, a_stride, b, depth, factors, c, c_stride);
      b.data += b.stride;
      b.next += depth / P * kLine;
      c += 16;
    }
  }

  static void product_all(const A* a, int64_t a_stride, const Lines& b, int64_t depth,
                          const float* factors, float* c, int64_t c_stride, int64_t columns,
                          int64_t rows) {
    while (rows > 0) {
      int64_t done = 0;
      const auto take = [&]<int R>() {
        product_rows<R>(a, a_stride, b, depth, factors, c, c_stride, columns);
        done = R;
      };
      if (rows >= 9 || rows == 6 || rows == 7) {
        take.template operator()<6>();
      } else if (rows == 8 || rows == 4) {
        take.template operator()<4>();
      } else if (rows == 5 || rows == 3) {
        take.template operator()<3>();
      } else if (rows == 2) {
        take.template operator()<2>();
      } else {
        take.template operator()<1>();
      }
      rows -= done;
      a += done * a_stride;
      c += done * c_stride;
      if (factors != nullptr) factors += done;
    }
  }

  // The tile's state, in scratch.
  struct State {
    int64_t rows;
    int64_t dim;
    float* q;        // [rows][dim], scaled; with kPairs dwords of pairs, half of a row
    float* scores;   // [rows][64], then probabilities, in the same way
    float* out;      // [rows][dim], of this chunk
    float* total;    // [rows][dim], of the chunks before
    float* max;      // [rows], of this chunk
    float* sum;      // [rows]
    float* factors;  // [rows]
    float* total_max;
    float* total_sum;
  };

  static State make_state(const AttentionTile& tile) {
    State s;
    s.rows = static_cast<int64_t>(tile.num_tokens) * tile.group;
    s.dim = tile.head_dim;
    s.q = tile.scratch;
    s.scores = s.q + s.rows * s.dim;
    s.out = s.scores + s.rows * kernels::kPageSize;
    s.total = s.out + s.rows * s.dim;
    s.max = s.total + s.rows * s.dim;
    s.sum = s.max + s.rows;
    s.factors = s.sum + s.rows;
    s.total_max = s.factors + s.rows;
    s.total_sum = s.total_max + s.rows;
    return s;
  }

  // Element `index` on of a row of factors.
  [[gnu::always_inline]] static void store_factor(V x, float* row, int64_t index) {
    if constexpr (Kv::kPairs) {
      Kv::store_pairs(x, reinterpret_cast<uint32_t*>(row) + index / 2);
    } else {
      x.store(row + index);
    }
  }
  static const A* factors_at(const float* row, int64_t index) {
    return reinterpret_cast<const A*>(row) + (Kv::kPairs ? index / 2 : index);
  }

  static void load_queries(const AttentionTile& tile, const State& s) {
    const V scale = V::set(tile.sm_scale);
    for (int64_t row = 0; row < s.rows; ++row) {
      const float* from = tile.q + row / tile.group * tile.q_stride + row % tile.group * s.dim;
      for (int64_t d = 0; d < s.dim; d += 16) {
        store_factor(V::load(from + d) * scale, s.q + row * s.dim, d);
      }
    }
  }

  static void fill(float* p, int64_t count, float value) {
    for (int64_t i = 0; i < count; ++i) p[i] = value;
  }

  // Tokens of a page, relative to its first.
  struct Range {
    int64_t begin;
    int64_t end;
  };

  // Bits [begin, end) of a page's tokens.
  static uint64_t token_bits(int64_t begin, int64_t end) {
    if (begin < 0) begin = 0;
    if (end > kernels::kPageSize) end = kernels::kPageSize;
    if (begin >= end) return 0;
    return ~uint64_t{0} >> (64 - (end - begin)) << begin;
  }

  // Bits of the step's own tokens, whose first lies `shift` tokens into the page.
  static uint64_t place(uint64_t bits, int64_t shift) {
    if (shift <= -64 || shift >= 64) return 0;
    return shift >= 0 ? bits << shift : bits >> -shift;
  }

  // Which tokens of a page a token of the tile sees: those that are not after it and not behind its
  // window, or are sinks; of its own step's tokens, in a tree, its ancestors.
  static uint64_t visible(const AttentionTile& tile, int64_t token, int64_t page) {
    const int64_t start = page * kernels::kPageSize;
    const bool windowed = tile.window_left >= 0;
    const uint64_t sinks = windowed ? token_bits(0, tile.sinks - start) : 0;
    if (tile.ancestors == nullptr) {
      const int64_t position = tile.position + token - start;
      const uint64_t past = token_bits(0, position + 1);
      if (!windowed) return past;
      return past & (token_bits(position - tile.window_left, kernels::kPageSize) | sinks);
    }
    const int64_t shift = tile.step_start - start;
    uint64_t near = tile.ancestors[token];
    const uint64_t tree = place(near, shift);
    if (!windowed) return token_bits(0, shift) | tree;
    // A token's position is its depth, an ancestor's number among the ancestors.
    const int64_t depth = __builtin_popcountll(near) - 1;
    for (int64_t i = tile.window_left; i < depth; ++i) near &= near - 1;
    const uint64_t before =
        token_bits(shift + depth - tile.window_left, shift) | place(near, shift);
    return before | (sinks & (token_bits(0, shift) | tree));
  }

  // Scores of a row to probabilities (times the scales of V): the row's maximum, sum and the factor
  // on what it has summed so far.
  static void softmax_row(const AttentionTile& tile, const State& s, int64_t row, Range all,
                          uint64_t seen, int64_t page_id) {
    float* scores = s.scores + row * kernels::kPageSize;
    const float* k_scale = Kv::kScaled ? tile.k_scale + page_id * tile.page_scales : nullptr;
    const float* v_scale = Kv::kScaled ? tile.v_scale + page_id * tile.page_scales : nullptr;
    const float old_max = s.max[row];
    V highest = V::set(old_max);
    const auto mask = [&](V x, int64_t t, float hidden) __attribute__((always_inline)) {
      const auto bits = static_cast<uint32_t>(seen >> t & 0xffff);
      return bits == 0xffff ? x : keep(bits, x, V::set(hidden));
    };
    for (int64_t t = all.begin; t < all.end; t += 16) {
      V x = V::load(scores + t);
      if constexpr (Kv::kScaled) x = x * V::load(k_scale + t);
      if (tile.soft_cap > 0.0f) {
        const V cap = V::set(tile.soft_cap);
        x = tanh(x / cap) * cap;
      }
      x = mask(x, t, -__builtin_inff());
      highest = max(highest, x);
      x.store(scores + t);
    }
    const float new_max = maximum(highest);
    V sums = V::set(0.0f);
    for (int64_t t = all.begin; t < all.end; t += 16) {
      V p = exp(V::load(scores + t) - V::set(new_max));
      sums = sums + p;
      if constexpr (Kv::kScaled) p = p * mask(V::load(v_scale + t), t, 0.0f);
      store_factor(p, scores, t);  // behind what is still to be read
    }
    const float factor = first_lane(exp(V::set(old_max - new_max)));
    s.max[row] = new_max;
    s.sum[row] = s.sum[row] * factor + sum(sums);
    s.factors[row] = factor;
  }

  static float first_lane(V x) {
    alignas(64) float lanes[16];
    x.store(lanes);
    return lanes[0];
  }

  static void do_page(const AttentionTile& tile, const State& s, int64_t page) {
    uint64_t any = 0;
    for (int32_t token = 0; token < tile.num_tokens; ++token) any |= visible(tile, token, page);
    if (any == 0) return;
    const int64_t page_id = tile.pages[page];
    const uint8_t* k = tile.k + page_id * tile.page_bytes;
    const uint8_t* v = tile.v + page_id * tile.page_bytes;
    const int64_t next_page = page + 1 < tile.end_page ? page + 1 : page;
    const int64_t ahead = (tile.pages[next_page] - page_id) * tile.page_bytes;
    const Range keys = {__builtin_ctzll(any), 64 - __builtin_clzll(any)};
    const Range groups = {keys.begin / 16 * 16, (keys.end + 15) / 16 * 16};
    const int64_t k_lines = s.dim / P;  // of 16 tokens
    k += groups.begin / 16 * k_lines * kLine;
    product_all(factors_at(s.q, 0), s.dim, {k, kLine, k_lines * kLine, k + ahead}, s.dim, nullptr,
                s.scores + groups.begin, kernels::kPageSize, (groups.end - groups.begin) / 16,
                s.rows);
    uint64_t seen = 0;
    for (int64_t row = 0; row < s.rows; ++row) {
      if (row % tile.group == 0) seen = visible(tile, row / tile.group, page);
      softmax_row(tile, s, row, groups, seen, page_id);
    }
    const int64_t v_lines = s.dim / 16;  // of P tokens
    const int64_t first = keys.begin / P * P;
    v += first / P * v_lines * kLine;
    product_all(factors_at(s.scores, first), kernels::kPageSize,
                {v, v_lines * kLine, kLine, v + ahead}, keys.end - first, s.factors, s.out, s.dim,
                v_lines, s.rows);
  }

  // (max, sum, out) of what came before, and of one chunk: their combination. The maximum's own
  // side has a factor of exactly 1; a side without keys adds exact zeros.
  static void fold(float& max, float& sum, float* out, float chunk_max, float chunk_sum,
                   const float* chunk_out, int64_t dim) {
    const float highest = chunk_max > max ? chunk_max : max;
    const V a = exp(V::set(max - highest));
    const V b = exp(V::set(chunk_max - highest));
    max = highest;
    sum = first_lane(fma(V::set(chunk_sum), b, V::set(sum) * a));
    for (int64_t d = 0; d < dim; d += 16) {
      fma(V::load(chunk_out + d), b, V::load(out + d) * a).store(out + d);
    }
  }

  // A row that sees no key is zeros.
  static void write_row(const float* values, float sum, int64_t dim, float* out) {
    const V divisor = V::set(sum == 0.0f ? 1.0f : sum);
    for (int64_t d = 0; d < dim; d += 16) (V::load(values + d) / divisor).store(out + d);
  }

  static void write(const AttentionTile& tile, const State& s, const float* values,
                    const float* max, const float* sum) {
    for (int64_t row = 0; row < s.rows; ++row) {
      const float* from = values + row * s.dim;
      if (tile.partial_out == nullptr) {
        write_row(from, sum[row], s.dim,
                  tile.out + row / tile.group * tile.out_stride + row % tile.group * s.dim);
        continue;
      }
      for (int64_t d = 0; d < s.dim; d += 16) {
        V::load(from + d).store(tile.partial_out + row * s.dim + d);
      }
      tile.partial_ms[2 * row] = max[row];
      tile.partial_ms[2 * row + 1] = sum[row];
    }
  }

  static void run_tile(const AttentionTile& tile) {
    constexpr int64_t kChunkPages = kernels::kKvChunk / kernels::kPageSize;
    const State s = make_state(tile);
    load_queries(tile, s);
    const bool one_chunk = tile.first_page / kChunkPages == (tile.end_page - 1) / kChunkPages;
    if (!one_chunk) {
      fill(s.total, s.rows * s.dim, 0.0f);
      fill(s.total_max, s.rows, kNoScore);
      fill(s.total_sum, s.rows, 0.0f);
    }
    int64_t page = tile.first_page;
    while (page < tile.end_page) {
      const int64_t chunk_end = (page / kChunkPages + 1) * kChunkPages;
      fill(s.out, s.rows * s.dim, 0.0f);
      fill(s.max, s.rows, kNoScore);
      fill(s.sum, s.rows, 0.0f);
      for (; page < chunk_end && page < tile.end_page; ++page) do_page(tile, s, page);
      if (one_chunk) break;
      for (int64_t row = 0; row < s.rows; ++row) {
        fold(s.total_max[row], s.total_sum[row], s.total + row * s.dim, s.max[row], s.sum[row],
             s.out + row * s.dim, s.dim);
      }
    }
    if (one_chunk) {
      write(tile, s, s.out, s.max, s.sum);
    } else {
      write(tile, s, s.total, s.total_max, s.total_sum);
    }
  }

  static void run_merge(const AttentionMerge& merge) {
    for (int64_t head = 0; head < merge.group; ++head) {
      float max = kNoScore;
      float sum = 0.0f;
      fill(merge.scratch, merge.head_dim, 0.0f);
      for (int64_t i = 0; i < merge.num_partials; ++i) {
        const int64_t partial = i * merge.stride + head;
        fold(max, sum, merge.scratch, merge.partial_ms[2 * partial],
             merge.partial_ms[2 * partial + 1], merge.partial_out + partial * merge.head_dim,
             merge.head_dim);
      }
      write_row(merge.scratch, sum, merge.head_dim, merge.out + head * merge.head_dim);
    }
  }
};

// The kernels of a level from its four KV views.
template <class F32, class F16, class Bf16, class I8>
void attention_tile(DType dtype, const AttentionTile& tile) {
  switch (dtype) {
    case DType::f32:
      return AttentionBody<F32>::run_tile(tile);
    case DType::f16:
      return AttentionBody<F16>::run_tile(tile);
    case DType::bf16:
      return AttentionBody<Bf16>::run_tile(tile);
    default:
      return AttentionBody<I8>::run_tile(tile);
  }
}

}  // namespace effinfer::cpu::simd
