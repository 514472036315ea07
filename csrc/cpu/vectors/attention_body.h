// Attention of a tile of query rows over the pages of one KV head: the kernel of every ISA level.
//
// A page goes through three passes: scores (Q K^T), softmax, output (P V). The outer two are the
// same small matrix product, because both K and V lines are 16 columns x P steps of the inner
// dimension (ops/kv_layout.h). Each result is one chain of multiply-adds in the order of the
// inner dimension, whatever the register tile.
//
// Products computes them: in vector registers here, on tiles in vectors/attention_amx.h. Made for a
// number of rows and memory of attention_spare_floats(head_dim), it brings
//   padded_rows(rows)   how many rows of its operands and results it may touch
//   kKeyStep            scores of a page begin and end at multiples of it
//   kValueStep          values of a page begin at a multiple of it
//   multiply(...)       as AttentionMath::product_all
//   release()           at the end
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/page_gather.h"
#include "ops/attention.h"

namespace effinfer::cpu::simd {

template <class Kv>
struct VectorProducts {
  using Math = AttentionMath<Kv>;
  static constexpr int64_t kKeyStep = 16;
  static constexpr int64_t kValueStep = Kv::P;

  VectorProducts(int64_t, float*) {}
  static void release() {}
  static int64_t padded_rows(int64_t rows) { return rows; }
  static void multiply(const typename Math::A* a, int64_t a_stride, const typename Math::Lines& b,
                       int64_t depth, const float* factors, float* c, int64_t c_stride,
                       int64_t columns, int64_t rows) {
    Math::product_all(a, a_stride, b, depth, factors, c, c_stride, columns, rows);
  }
};

template <class Kv, class Products = VectorProducts<Kv>>
struct AttentionBody {
  using Math = AttentionMath<Kv>;
  using V = typename Kv::V;
  static constexpr int P = Kv::P;
  static constexpr int64_t kLine = Math::kLine;
  // Visited tokens of a page up to which gathering them costs less than multiplying the others.
  static constexpr int kGatherTokens = 40;

  // The tile's state, in scratch. All arrays are of padded_rows.
  struct State {
    int64_t rows;
    int64_t padded_rows;
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
    float* spare;   // of the products
    float* gather;  // of PageGather
  };

  // 64 tokens, or fewer at the front, that are multiplied together.
  struct Page {
    const uint8_t* k;
    const uint8_t* v;
    const float* k_scale;
    const float* v_scale;
    int64_t ahead;  // bytes to what is likely to be next
  };

  static State make_state(const AttentionTile& tile) {
    State s;
    s.rows = static_cast<int64_t>(tile.num_tokens) * tile.group;
    s.dim = tile.head_dim;
    s.padded_rows = Products::padded_rows(s.rows);
    const int64_t rows = s.padded_rows;
    s.q = tile.scratch;
    s.scores = s.q + rows * s.dim;
    s.out = s.scores + rows * ops::kPageSize;
    s.total = s.out + rows * s.dim;
    s.spare = s.total + rows * s.dim;
    s.max = s.spare + attention_spare_floats(s.dim);
    s.sum = s.max + rows;
    s.factors = s.sum + rows;
    s.total_max = s.factors + rows;
    s.total_sum = s.total_max + rows;
    s.gather = s.total_sum + rows;
    return s;
  }

  static void load_queries(const AttentionTile& tile, const State& s) {
    const V scale = V::set(tile.sm_scale);
    for (int64_t row = 0; row < s.rows; ++row) {
      const float* from = tile.q + row / tile.group * tile.q_stride + row % tile.group * s.dim;
      for (int64_t d = 0; d < s.dim; d += 16) {
        Math::store_factor(V::load(from + d) * scale, s.q + row * s.dim, d);
      }
    }
    Math::fill(s.q + s.rows * s.dim, (s.padded_rows - s.rows) * s.dim, 0.0f);
  }

  // Bits of the step's own tokens, whose first lies `shift` tokens into the page.
  static uint64_t place(uint64_t bits, int64_t shift) {
    if (shift <= -64 || shift >= 64) return 0;
    return shift >= 0 ? bits << shift : bits >> -shift;
  }

  // Which tokens of a page a token of the tile sees: those that are not after it and not behind its
  // window, or are sinks; of its own step's tokens, in a tree, its ancestors.
  static uint64_t visible(const AttentionTile& tile, int64_t token, int64_t page) {
    const int64_t start = page * ops::kPageSize;
    const bool windowed = tile.window_left >= 0;
    const uint64_t sinks = windowed ? Math::token_bits(0, tile.sinks - start) : 0;
    if (tile.ancestors == nullptr) {
      const int64_t position = tile.position + token - start;
      const uint64_t past = Math::token_bits(0, position + 1);
      if (!windowed) return tile.visits == nullptr ? past : past & tile.visits[page];
      return past & (Math::token_bits(position - tile.window_left, ops::kPageSize) | sinks);
    }
    const int64_t shift = tile.step_start - start;
    uint64_t near = tile.ancestors[token];
    const uint64_t tree = place(near, shift);
    if (!windowed) return Math::token_bits(0, shift) | tree;
    // A token's position is its depth, an ancestor's number among the ancestors.
    const int64_t depth = __builtin_popcountll(near) - 1;
    for (int64_t i = tile.window_left; i < depth; ++i) near &= near - 1;
    const uint64_t before =
        Math::token_bits(shift + depth - tile.window_left, shift) | place(near, shift);
    return before | (sinks & (Math::token_bits(0, shift) | tree));
  }

  // Scores of a row to probabilities (times the scales of V).
  static void softmax_row(const AttentionTile& tile, const State& s, int64_t row, TokenRange all,
                          uint64_t seen, const Page& page) {
    const auto adjust = [&](V x, int64_t t) __attribute__((always_inline)) {
      if constexpr (Kv::kScaled) x = x * V::load(page.k_scale + t);
      if (tile.soft_cap <= 0.0f) return x;
      const V cap = V::set(tile.soft_cap);
      return tanh(x / cap) * cap;
    };
    const auto weigh = [&](V p, int64_t t) __attribute__((always_inline)) {
      if constexpr (Kv::kScaled) return p * Math::only(seen, t, V::load(page.v_scale + t), 0.0f);
      return p;
    };
    Math::softmax_row(s.scores + row * ops::kPageSize, all, seen, s.max[row], s.sum[row],
                      s.factors[row], adjust, weigh);
  }

  // What comes next of pages [page, end) that is visited; `end` when nothing is.
  static int64_t next_visited(const AttentionTile& tile, int64_t page, int64_t end) {
    if (tile.visits == nullptr) return page;
    while (page < end && tile.visits[page] == 0) ++page;
    return page;
  }

  static void do_page(const AttentionTile& tile, const State& s, Products& products, int64_t page) {
    uint64_t any = 0;
    for (int32_t token = 0; token < tile.num_tokens; ++token) any |= visible(tile, token, page);
    if (any == 0) return;
    const int64_t page_id = tile.pages[page];
    const int64_t next = next_visited(tile, page + 1, tile.end_page);
    const int64_t next_id = tile.pages[next < tile.end_page ? next : page];
    const Page at = {tile.k + page_id * tile.page_bytes, tile.v + page_id * tile.page_bytes,
                     Kv::kScaled ? tile.k_scale + page_id * tile.page_scales : nullptr,
                     Kv::kScaled ? tile.v_scale + page_id * tile.page_scales : nullptr,
                     (next_id - page_id) * tile.page_bytes};
    attend(tile, s, products, at, any, [&](int64_t token) { return visible(tile, token, page); });
  }

  // `any` are the tokens that some row sees, seen(token) those that the rows of a token see.
  template <class Seen>
  static void attend(const AttentionTile& tile, const State& s, Products& products,
                     const Page& page, uint64_t any, Seen&& seen_by) {
    const TokenRange keys = {__builtin_ctzll(any), 64 - __builtin_clzll(any)};
    constexpr int64_t kKeyStep = Products::kKeyStep;
    const TokenRange groups = {keys.begin / kKeyStep * kKeyStep,
                               (keys.end + kKeyStep - 1) / kKeyStep * kKeyStep};
    const int64_t k_lines = s.dim / P;  // of 16 tokens
    const uint8_t* k = page.k + groups.begin / 16 * k_lines * kLine;
    products.multiply(Math::factors_at(s.q, 0), s.dim, {k, kLine, k_lines * kLine, k + page.ahead},
                      s.dim, nullptr, s.scores + groups.begin, ops::kPageSize,
                      (groups.end - groups.begin) / 16, s.rows);
    uint64_t seen = 0;
    for (int64_t row = 0; row < s.rows; ++row) {
      if (row % tile.group == 0) seen = seen_by(row / tile.group);
      softmax_row(tile, s, row, groups, seen, page);
    }
    const int64_t v_lines = s.dim / 16;  // of P tokens
    const int64_t first = keys.begin / Products::kValueStep * Products::kValueStep;
    const uint8_t* v = page.v + first / P * v_lines * kLine;
    products.multiply(Math::factors_at(s.scores, first), ops::kPageSize,
                      {v, v_lines * kLine, kLine, v + page.ahead}, keys.end - first, s.factors,
                      s.out, s.dim, v_lines, s.rows);
  }

  // Pages [page, end) of a chunk, of which the tile has a list: those before all rows of which few
  // tokens are visited are gathered, 64 tokens at a time.
  static void do_listed(const AttentionTile& tile, const State& s, Products& products, int64_t page,
                        int64_t end) {
    PageGather<P> gather(tile, s.gather);
    const auto flush = [&] {
      if (gather.count() == 0) return;
      const uint64_t all = Math::token_bits(0, gather.count());
      gather.pack();
      attend(tile, s, products, {gather.k(), gather.v(), gather.k_scale(), gather.v_scale(), 0},
             all, [&](int64_t) { return all; });
      gather.clear();
    };
    for (; (page = next_visited(tile, page, end)) < end; ++page) {
      uint64_t bits = tile.visits[page];
      const bool past = (page + 1) * ops::kPageSize <= tile.position;
      if (!past || __builtin_popcountll(bits) > kGatherTokens) {
        do_page(tile, s, products, page);
        continue;
      }
      while ((bits = gather.add(page, bits)) != 0) flush();
    }
    flush();
  }

  static void write(const AttentionTile& tile, const State& s, const float* values,
                    const float* max, const float* sum) {
    for (int64_t row = 0; row < s.rows; ++row) {
      const float* from = values + row * s.dim;
      if (tile.partial_out == nullptr) {
        Math::write_row(from, sum[row], s.dim,
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
    constexpr int64_t kChunkPages = ops::kKvChunk / ops::kPageSize;
    const State s = make_state(tile);
    Products products(s.rows, s.spare);
    load_queries(tile, s);
    const bool one_chunk = tile.first_page / kChunkPages == (tile.end_page - 1) / kChunkPages;
    if (!one_chunk) {
      Math::fill(s.total, s.rows * s.dim, 0.0f);
      Math::fill(s.total_max, s.rows, kNoScore);
      Math::fill(s.total_sum, s.rows, 0.0f);
    }
    int64_t page = tile.first_page;
    while (page < tile.end_page) {
      const int64_t chunk_end = (page / kChunkPages + 1) * kChunkPages;
      Math::fill(s.out, s.padded_rows * s.dim, 0.0f);
      Math::fill(s.max, s.rows, kNoScore);
      Math::fill(s.sum, s.rows, 0.0f);
      const int64_t end = chunk_end < tile.end_page ? chunk_end : tile.end_page;
      if (tile.visits != nullptr) {
        do_listed(tile, s, products, page, end);
        page = end;
      }
      for (; page < end; ++page) do_page(tile, s, products, page);
      if (one_chunk) break;
      for (int64_t row = 0; row < s.rows; ++row) {
        Math::fold(s.total_max[row], s.total_sum[row], s.total + row * s.dim, s.max[row],
                   s.sum[row], s.out + row * s.dim, s.dim);
      }
    }
    products.release();
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
      Math::fill(merge.scratch, merge.head_dim, 0.0f);
      for (int64_t i = 0; i < merge.num_partials; ++i) {
        const int64_t partial = i * merge.stride + head;
        Math::fold(max, sum, merge.scratch, merge.partial_ms[2 * partial],
                   merge.partial_ms[2 * partial + 1], merge.partial_out + partial * merge.head_dim,
                   merge.head_dim);
      }
      Math::write_row(merge.scratch, sum, merge.head_dim, merge.out + head * merge.head_dim);
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
