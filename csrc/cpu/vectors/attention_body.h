// Attention of a tile of query rows over the units of its keys: the kernel of every ISA level.
//
// A unit goes through three passes: scores (Q K^T), softmax, output (P V). The outer two are the
// same small matrix product, because both K and V lines are 16 columns x P steps of the inner
// dimension (ops/kv_layout.h). Each result is one chain of multiply-adds in the order of the inner
// dimension, whatever the register tile.
//
// Products computes them: in vector registers here, on tiles in vectors/attention_amx.h. Made for a
// number of rows and memory of attention_spare_floats(dim_vo), it brings
//   kTiles              whether products are on tiles, for which keys and values are gathered
//   padded_rows(rows)   how many rows of its operands and results it may touch
//   kKeyStep            scores of a unit begin and end at multiples of it
//   kValueStep          values of a unit begin at a multiple of it
//   band_rows()         a product is of rows from a multiple of it on
//   multiply(...)       as AttentionMath::product_all
//   release()           at the end
//
// Source brings the units: vectors/key_pages.h, vectors/key_rows.h.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/kept_weights.h"
#include "cpu/vectors/key_unit.h"
#include "cpu/vectors/query_rows.h"
#include "cpu/vectors/row_vectors.h"
#include "cpu/vectors/softmax.h"

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
  // Fewer rows would load lines more often than multiply them.
  static int64_t band_rows() { return 16; }
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
  static constexpr int kMostBands = 8;

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
    float* sums;     // [rows][16], of this chunk, in lanes
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
    s.sums = take(rows * 16);
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

  // Tile rows that are multiplied together, with keys from the first that one of them sees to the
  // last.
  struct Band {
    int64_t first;
    int64_t rows;
    TokenRange keys;
  };

  // Cuts the tile into bands where rows see different lines of keys: the unit on the diagonal is a
  // triangle, and half of its square would be multiplied for nothing. `all` is what any row sees,
  // `common` what every row does. Rows that see nothing are in no band or in one with others.
  static int find_bands(const AttentionTask& task, const State& s, int64_t step, uint64_t all,
                        uint64_t common, Band (&bands)[kMostBands]) {
    if (all == common) {
      bands[0] = {0, s.rows, range_of(all)};
      return 1;
    }
    const auto seen_by = [&](int64_t first) {
      const int64_t end = first + step < s.rows ? first + step : s.rows;
      uint64_t seen = 0;
      for (int64_t token = first / task.num_heads; token * task.num_heads < end; ++token) {
        seen |= s.seen[token];
      }
      return seen;
    };
    int count = 0;
    for (int64_t first = 0; first < s.rows;) {
      uint64_t seen = seen_by(first);
      int64_t end = first + step;
      for (; end < s.rows; end += step) {
        const uint64_t more = seen_by(end);
        if (count + 1 < kMostBands && !same_lines(seen, more)) break;
        seen |= more;
      }
      if (end > s.rows) end = s.rows;
      if (seen != 0) bands[count++] = {first, end - first, range_of(seen)};
      first = end;
    }
    return count;
  }

  // From the first key to behind the last.
  static TokenRange range_of(uint64_t seen) {
    return {__builtin_ctzll(seen), kUnit - __builtin_clzll(seen)};
  }
  static TokenRange lines_of(TokenRange keys) {
    constexpr int64_t kStep = Products::kKeyStep;
    return {keys.begin / kStep * kStep, (keys.end + kStep - 1) / kStep * kStep};
  }
  static bool same_lines(uint64_t a, uint64_t b) {
    if (a == 0 || b == 0) return a == b;
    const TokenRange x = lines_of(range_of(a));
    const TokenRange y = lines_of(range_of(b));
    return x.begin == y.begin && x.end == y.end;
  }

  // Rows that see nothing of the unit stay as they are, which is what folding nothing into them
  // would leave.
  template <class Units>
  static void do_unit(const AttentionTask& task, const State& s, const Products& products,
                      Units& source) {
    const KeyUnit& unit = source.unit();
    uint64_t all = 0;
    uint64_t common = ~uint64_t{0};
    for (int64_t token = 0; token < task.num_rows; ++token) {
      s.seen[token] = source.all_seen() ? unit.visited : seen_of(task, unit, token);
      all |= s.seen[token];
      common &= s.seen[token];
    }
    if (all == 0) return;
    Band bands[kMostBands] = {};
    const int count = find_bands(task, s, products.band_rows(), all, common, bands);
    for (int i = 0; i < count; ++i) {
      const auto& [first, rows, keys] = bands[i];
      source.score(Math::factors_at(s.q + first * s.dim_qk, 0), s.dim_qk, lines_of(keys), rows,
                   s.scores + first * kUnit);
    }
    float positions[kUnit];
    if (task.alibi_slopes != nullptr) find_positions(unit, positions);
    const Band& last = bands[count - 1];
    Softmax<Kv>::weigh(
        task,
        {source.k_scales(), source.v_scales(), source.log_weights(),
         task.first_logits != nullptr && source.has_first(), positions, unit.runs[0].position},
        s.seen, bands[0].first / task.num_heads, (last.first + last.rows - 1) / task.num_heads + 1,
        {s.scores, s.max, s.sums, s.factors});
    for (int i = 0; i < count; ++i) {
      const auto& [first, rows, keys] = bands[i];
      source.add_values(s.scores + first * kUnit, s.dim_vo, keys, rows, s.factors + first,
                        s.out + first * s.dim_vo);
    }
  }

  // Leaves what the rows have of a chunk in out, max and sum.
  template <class Units>
  static void do_chunk(const AttentionTask& task, const State& s, const Products& products,
                       Units& source, int32_t chunk) {
    clear(s, s.out, s.max, s.sum);
    Math::fill(s.sums, s.rows * 16, 0.0f);
    for (; source.chunk() == chunk; source.advance()) do_unit(task, s, products, source);
    for (int64_t row = 0; row < s.rows; ++row) s.sum[row] = sum(V::load(s.sums + row * 16));
    if (task.kept != nullptr) KeptBody<Kv>::keep_chunk(task, chunk, s.max, s.sum);
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

  // Those that the keys of a chunk of units are multiplied with.
  static const ops::QueryRows& queries_of(const AttentionTask& task, int32_t chunk) {
    const int32_t back = task.chunk == 0 ? 0 : task.own_chunk - chunk / task.chunk;
    return back == 0 ? task.q : back == 1 ? task.q_before : task.q_far;
  }

  static void run(const AttentionTask& task) {
    const State s = make_state(task);
    Products products(s.rows, s.spare);
    const ops::QueryRows* queries = &queries_of(task, task.first_unit / ops::kChunkUnits);
    load_queries<Kv>(task, *queries, 0, s.rows, s.dim_qk, s.row, s.q);
    Math::fill(s.q + s.rows * s.dim_qk, (s.padded_rows - s.rows) * s.dim_qk, 0.0f);
    const int32_t first = task.first_unit / ops::kChunkUnits;
    const int32_t last = (task.end_unit - 1) / ops::kChunkUnits;
    const bool splits = task.partial_out != nullptr;
    const bool folds = !splits && first < last;
    if (folds) clear(s, s.total, s.total_max, s.total_sum);
    Source<Kv, Products> source(task, products, s.source);
    for (int32_t chunk = first; chunk <= last; ++chunk) {
      if (folds && source.chunk() != chunk) continue;  // nothing of it is visited
      if (const ops::QueryRows* next = &queries_of(task, chunk); next != queries) {
        queries = next;
        load_queries<Kv>(task, *queries, 0, s.rows, s.dim_qk, s.row, s.q);
      }
      do_chunk(task, s, products, source, chunk);
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
