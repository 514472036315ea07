// Attention of a tile of query rows over the units of its keys: the kernel of every ISA level.
//
// A unit goes through three passes: scores (Q K^T), softmax, output (P V). The outer two are the
// same small matrix product, because both K and V lines are 16 columns x P steps of the inner
// dimension (ops/kv_layout.h). Each result is one chain of multiply-adds in the order of the inner
// dimension, whatever the register tile.
//
// Products computes them: in vector registers here, on tiles in vectors/attention_amx.h. Made for a
// number of rows and memory of attention_spare_floats(dim_vo), it brings
//   kTiles              whether every product is of all rows
//   padded_rows(rows)   how many rows of its operands and results it may touch
//   kKeyStep            scores of a unit begin and end at multiples of it
//   kValueStep          values of a unit begin at a multiple of it
//   multiply(...)       as AttentionMath::product_all
//   release()           at the end
//
// Source brings the units: vectors/key_pages.h, vectors/key_rows.h.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/key_unit.h"
#include "cpu/vectors/query_rows.h"
#include "cpu/vectors/row_vectors.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv>
struct VectorProducts {
  using Math = AttentionMath<Kv>;
  static constexpr bool kTiles = false;
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

// Where and how a row's result leaves: what folding partial results needs too.
template <class V>
struct RowWriter {
  static uint8_t* place(const AttentionTask& task, int64_t row) {
    const int64_t at =
        row / task.num_heads * task.out_row_stride + row % task.num_heads * task.v.dims;
    return task.out + at * float_bytes(task.out_dtype);
  }

  // A row that sees no key is zeros, and the logarithm of its sum minus infinity.
  template <class Math>
  static void write(const AttentionTask& task, int64_t row, const float* values, float max,
                    float sum) {
    const int64_t token = row / task.num_heads;
    const int64_t head = row % task.num_heads;
    float scale = task.v_scale;
    if (task.sink_logits != nullptr) {
      const float sink = task.sink_logits[head];
      const float highest = sink > max ? sink : max;
      const float kept = Math::first_lane(simd::exp(V::set(max - highest)));
      sum = sum * kept + Math::first_lane(simd::exp(V::set(sink - highest)));
      scale *= kept;
      max = highest;
    }
    const V divisor = V::set(sum == 0.0f ? 1.0f : sum);
    const V factor = V::set(scale);
    with_float_type(task.out_dtype, [&]<class T>() {
      auto* to = reinterpret_cast<T*>(place(task, row));
      for_vectors(task.v.dims, [&](int64_t d, auto&&, auto&& store) {
        store(to + d, V::load(values + d) / divisor * factor);
      });
    });
    if (task.lse == nullptr) return;
    task.lse[token * task.lse_row_stride + head] =
        sum == 0.0f ? -__builtin_inff() : (max + __builtin_logf(sum)) * task.lse_factor;
  }
};

template <class Kv, class Products, template <class, class> class Source>
struct AttentionBody {
  using Math = AttentionMath<Kv>;
  using V = typename Kv::V;
  using Writer = RowWriter<V>;

  // The tile's state, in scratch. All arrays are of padded_rows.
  struct State {
    int64_t rows;
    int64_t padded_rows;
    int64_t dim_qk;  // multiples of 16
    int64_t dim_vo;
    float* q;        // [rows][dim_qk]; with kPairs dwords of pairs, half of a row
    float* scores;   // [rows][64], then probabilities, in the same way
    float* out;      // [rows][dim_vo], of this chunk
    float* total;    // [rows][dim_vo], of the chunks before
    float* max;      // [rows], of this chunk
    float* sum;      // [rows]
    float* factors;  // [rows]
    float* total_max;
    float* total_sum;
    float* row;      // [dim], on its way in
    float* spare;    // of the products
    uint64_t* seen;  // [num_rows], of a unit
    float* source;   // of the source
  };

  static State make_state(const AttentionTask& task) {
    State s;
    s.rows = int64_t{task.num_rows} * task.num_heads;
    s.padded_rows = Products::padded_rows(s.rows);
    s.dim_qk = round_up_16(task.k.dims + task.k_rope.dims);
    s.dim_vo = round_up_16(task.v.dims);
    const int64_t rows = s.padded_rows;
    auto* next = reinterpret_cast<float*>(task.scratch);
    const auto take = [&](int64_t count) {
      float* taken = next;
      next += round_up_16(count);
      return taken;
    };
    s.q = take(rows * s.dim_qk);
    s.scores = take(rows * kUnit);
    s.out = take(rows * s.dim_vo);
    s.total = take(rows * s.dim_vo);
    s.spare = take(attention_spare_floats(s.dim_vo));
    float* numbers = take(round_up_16(rows) * 5);
    s.max = numbers;
    s.sum = numbers + rows;
    s.factors = numbers + 2 * rows;
    s.total_max = numbers + 3 * rows;
    s.total_sum = numbers + 4 * rows;
    s.row = take(s.dim_qk);
    s.seen = reinterpret_cast<uint64_t*>(take(2 * ((task.num_rows + 7) / 8 * 8)));
    s.source = next;
    return s;
  }

  // The slots' places in the sequence.
  static void find_positions(const KeyUnit& unit, float* positions) {
    for (int i = 0; i < unit.num_runs; ++i) {
      const TokenRun& run = unit.runs[i];
      for (int32_t t = 0; t < run.count; ++t) {
        positions[run.slot + t] = static_cast<float>(run.position + t);
      }
    }
  }

  // Scores of a row to probabilities (times the scales of V).
  template <class Units>
  static void softmax_row(const AttentionTask& task, const State& s, const Units& source,
                          const float* positions, int64_t row, TokenRange all) {
    const float* k_scales = source.k_scales();
    const float* v_scales = source.v_scales();
    const int64_t token = row / task.num_heads;
    const uint64_t seen = s.seen[token];
    const V scale = V::set(task.score_scale);
    const float slope =
        task.alibi_slopes != nullptr ? task.alibi_slopes[row % task.num_heads] : 0.0f;
    const V position = V::set(static_cast<float>(task.position + token));
    const auto adjust = [&](V x, int64_t t) __attribute__((always_inline)) {
      if (task.score_scale != 1.0f) x = x * scale;
      if (k_scales != nullptr) x = x * V::load(k_scales + t);
      if (task.soft_cap > 0.0f) {
        const V cap = V::set(task.soft_cap);
        x = simd::tanh(x / cap) * cap;
      }
      if (task.alibi_slopes != nullptr) {
        x = fma(V::set(slope), V::load(positions + t) - position, x);
      }
      return x;
    };
    const auto weigh = [&](V p, int64_t t) __attribute__((always_inline)) {
      if (v_scales == nullptr) return p;
      return p * Math::only(seen, t, V::load(v_scales + t), 0.0f);
    };
    Math::softmax_row(s.scores + row * kUnit, all, seen, s.max[row], s.sum[row], s.factors[row],
                      adjust, weigh);
  }

  // Rows that see nothing of the unit stay as they are, which is what folding nothing into them
  // would leave.
  template <class Units>
  static void do_unit(const AttentionTask& task, const State& s, const Units& source) {
    const KeyUnit& unit = source.unit();
    uint64_t any = 0;
    int64_t first_row = task.num_rows;
    int64_t end_row = 0;
    for (int64_t row = 0; row < task.num_rows; ++row) {
      s.seen[row] = source.all_seen() ? unit.visited : seen_of(task, unit, row);
      any |= s.seen[row];
      if (s.seen[row] == 0) continue;
      if (first_row > row) first_row = row;
      end_row = row + 1;
    }
    if (any == 0) return;
    if (Products::kTiles) {
      first_row = 0;
      end_row = task.num_rows;
    }
    const TokenRange keys = {__builtin_ctzll(any), kUnit - __builtin_clzll(any)};
    constexpr int64_t kStep = Products::kKeyStep;
    const TokenRange groups = {keys.begin / kStep * kStep, (keys.end + kStep - 1) / kStep * kStep};
    const int64_t first = first_row * task.num_heads;
    const int64_t rows = (end_row - first_row) * task.num_heads;
    float positions[kUnit];
    if (task.alibi_slopes != nullptr) find_positions(unit, positions);
    source.score(Math::factors_at(s.q + first * s.dim_qk, 0), s.dim_qk, groups, rows,
                 s.scores + first * kUnit);
    for (int64_t row = first; row < first + rows; ++row) {
      softmax_row(task, s, source, positions, row, groups);
    }
    source.add_values(s.scores + first * kUnit, s.dim_vo, keys, rows, s.factors + first,
                      s.out + first * s.dim_vo);
  }

  static void clear(const State& s, float* out, float* max, float* sum) {
    Math::fill(out, s.padded_rows * s.dim_vo, 0.0f);
    Math::fill(max, s.rows, kNoScore);
    Math::fill(sum, s.rows, 0.0f);
  }

  // The result of the chunk at hand is the tile's partial `index`.
  static void write_partial(const AttentionTask& task, const State& s, int64_t index) {
    float* out = task.partial_out + index * s.rows * s.dim_vo;
    float* ms = task.partial_ms + index * s.rows * 2;
    for (int64_t d = 0; d < s.rows * s.dim_vo; d += 16) V::load(s.out + d).store(out + d);
    for (int64_t row = 0; row < s.rows; ++row) {
      ms[2 * row] = s.max[row];
      ms[2 * row + 1] = s.sum[row];
    }
  }

  static void fold_chunk(const State& s) {
    for (int64_t row = 0; row < s.rows; ++row) {
      Math::fold(s.total_max[row], s.total_sum[row], s.total + row * s.dim_vo, s.max[row],
                 s.sum[row], s.out + row * s.dim_vo, s.dim_vo);
    }
  }

  static void write(const AttentionTask& task, const State& s, const float* values,
                    const float* max, const float* sum) {
    for (int64_t row = 0; row < s.rows; ++row) {
      if (row + kRowsAhead < s.rows) {
        prefetch_row<1>(Writer::place(task, row + kRowsAhead),
                        task.v.dims * float_bytes(task.out_dtype));
      }
      Writer::template write<Math>(task, row, values + row * s.dim_vo, max[row], sum[row]);
    }
  }

  static void run(const AttentionTask& task) {
    const State s = make_state(task);
    Products products(s.rows, s.spare);
    load_queries<Kv>(task, 0, s.rows, s.dim_qk, s.row, s.q);
    Math::fill(s.q + s.rows * s.dim_qk, (s.padded_rows - s.rows) * s.dim_qk, 0.0f);
    const int32_t first = task.first_unit / ops::kChunkUnits;
    const int32_t last = (task.end_unit - 1) / ops::kChunkUnits;
    const bool splits = task.partial_out != nullptr;
    const bool folds = !splits && first < last;
    if (folds) clear(s, s.total, s.total_max, s.total_sum);
    Source<Kv, Products> source(task, products, s.source);
    for (int32_t chunk = first; chunk <= last; ++chunk) {
      if (folds && source.chunk() != chunk) continue;  // nothing of it is visited
      clear(s, s.out, s.max, s.sum);
      for (; source.chunk() == chunk; source.advance()) do_unit(task, s, source);
      if (splits) write_partial(task, s, chunk - first);
      if (folds) fold_chunk(s);
    }
    products.release();
    if (folds) {
      write(task, s, s.total, s.total_max, s.total_sum);
    } else if (!splits) {
      if (first > last) clear(s, s.out, s.max, s.sum);  // no key at all
      write(task, s, s.out, s.max, s.sum);
    }
  }
};

// The partial results of a tile's chunks, from left to right.
template <class Kv>
void fold_attention(const AttentionTask& task, const AttentionFold& fold) {
  using Math = AttentionMath<Kv>;
  const int64_t rows = int64_t{task.num_rows} * task.num_heads;
  const int64_t dim = round_up_16(task.v.dims);
  auto* values = reinterpret_cast<float*>(task.scratch);
  for (int64_t row = 0; row < rows; ++row) {
    float max = kNoScore;
    float sum = 0.0f;
    Math::fill(values, dim, 0.0f);
    for (int64_t i = 0; i < fold.num_partials; ++i) {
      const int64_t partial = i * rows + row;
      Math::fold(max, sum, values, fold.partial_ms[2 * partial], fold.partial_ms[2 * partial + 1],
                 fold.partial_out + partial * dim, dim);
    }
    RowWriter<typename Kv::V>::template write<Math>(task, row, values, max, sum);
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
