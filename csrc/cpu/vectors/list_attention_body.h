// Attention of a tile of query rows over the tokens of its list: the kernel of every ISA level.
//
// A unit of 64 listed tokens goes through four passes: its keys and values are gathered into the
// order of the products (vectors/list_gather.h), then scores, softmax and output as for a page
// (vectors/attention_math.h).
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "cpu/list_attention.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/list_gather.h"
#include "cpu/vectors/list_rows.h"

namespace effinfer::cpu::simd {

template <class Kv, class Pack>
struct ListAttentionBody {
  using Math = AttentionMath<Kv>;
  using Gather = ListGather<Kv, Pack>;
  using Rows = ListRows<Kv, Pack>;
  using V = typename Kv::V;
  static constexpr int P = Kv::P;
  static constexpr int64_t kLine = Math::kLine;
  static constexpr int64_t kUnit = ops::kUnitTokens;
  // For up to so many rows keys and values are not gathered.
  static constexpr int64_t kDirectRows = 8;

  struct State {
    int64_t rows;
    int64_t dim_qk;  // multiples of 16
    int64_t dim_vo;
    bool direct;     // keys and values are multiplied where they lie
    uint64_t* seen;  // [num_rows], of a unit
    float* q;        // [rows][dim_qk]; with kPairs dwords of pairs, half of a row
    float* scores;   // [rows][64], then probabilities, in the same way
    float* out;      // [rows][dim_vo], of this chunk
    float* total;    // [rows][dim_vo], of the chunks before
    float* max;      // [rows], of this chunk
    float* sum;
    float* factors;
    float* total_max;
    float* total_sum;
    float* row;  // [dim], on its way in or out
    typename Gather::Buffers buffers;
  };

  // Whether rows are multiplied as they are: 8-bit numbers are converted while they are gathered.
  static bool in_place(const ops::KvRows& rows) {
    return rows.dims % 16 == 0 &&
           (rows.dtype == DType::f32 || rows.dtype == DType::f16 || rows.dtype == DType::bf16);
  }

  static State make_state(const ListAttentionTile& tile) {
    State s;
    s.rows = int64_t{tile.num_rows} * tile.num_heads;
    s.dim_qk = round_up_16(tile.k.dims + tile.k_rope.dims);
    s.dim_vo = round_up_16(tile.v.dims);
    s.direct =
        s.rows <= kDirectRows && in_place(tile.k) && in_place(tile.k_rope) && in_place(tile.v);
    s.seen = reinterpret_cast<uint64_t*>(tile.scratch);
    auto* next = reinterpret_cast<float*>(s.seen + (tile.num_rows + 7) / 8 * 8);
    const auto take = [&](int64_t count) {
      float* taken = next;
      next += (count + 15) / 16 * 16;
      return taken;
    };
    const int64_t widest = s.dim_qk > s.dim_vo ? s.dim_qk : s.dim_vo;
    s.buffers.keys = reinterpret_cast<uint8_t*>(take(kUnit * s.dim_qk));
    s.buffers.values = reinterpret_cast<uint8_t*>(take(kUnit * s.dim_vo));
    s.buffers.rows = reinterpret_cast<uint8_t*>(take(16 * widest));
    float* zeros = take(widest);
    Math::fill(zeros, widest, 0.0f);
    s.buffers.zeros = reinterpret_cast<uint8_t*>(zeros);
    s.row = take(widest);
    s.q = take(s.rows * s.dim_qk);
    s.scores = take(s.rows * kUnit);
    s.out = take(s.rows * s.dim_vo);
    s.total = take(s.rows * s.dim_vo);
    float* numbers = take(s.rows * 5);
    s.max = numbers;
    s.sum = numbers + s.rows;
    s.factors = numbers + 2 * s.rows;
    s.total_max = numbers + 3 * s.rows;
    s.total_sum = numbers + 4 * s.rows;
    return s;
  }

  static int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }  // of q and out

  // Query and result rows are a head's part of a token's, so the hardware does not foresee them.
  static constexpr int64_t kAhead = 8;
  template <int kWrite>
  static void prefetch(const uint8_t* row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, kWrite, 3);
  }

  static void to_floats(const uint8_t* from, DType dtype, int64_t count, float* to) {
    const auto convert = [&](const auto* numbers, auto&& to_float) {
      int64_t i = 0;
      for (; i + 16 <= count; i += 16) V::load(numbers + i).store(to + i);
      for (; i < count; ++i) to[i] = to_float(numbers[i]);
    };
    if (dtype == DType::f32) {
      convert(reinterpret_cast<const float*>(from), [](float x) { return x; });
    } else if (dtype == DType::f16) {
      convert(reinterpret_cast<const F16*>(from), [](F16 x) { return f16_to_f32(x.bits); });
    } else {
      convert(reinterpret_cast<const Bf16*>(from), [](Bf16 x) { return bf16_to_f32(x.bits); });
    }
  }

  // Of numbers times the factor.
  static void from_floats(const float* from, V factor, DType dtype, int64_t count, uint8_t* to) {
    const auto convert = [&](auto* numbers, auto&& narrow) {
      int64_t i = 0;
      for (; i + 16 <= count; i += 16) (V::load(from + i) * factor).store(numbers + i);
      if (i == count) return;
      float rest[16];
      (V::load(from + i) * factor).store(rest);
      for (int64_t j = i; j < count; ++j) numbers[j] = narrow(rest[j - i]);
    };
    if (dtype == DType::f32) {
      convert(reinterpret_cast<float*>(to), [](float x) { return x; });
    } else if (dtype == DType::f16) {
      convert(reinterpret_cast<F16*>(to), [](float x) { return F16{f32_to_f16(x)}; });
    } else {
      convert(reinterpret_cast<Bf16*>(to), [](float x) { return Bf16{f32_to_bf16(x)}; });
    }
  }

  static void load_queries(const ListAttentionTile& tile, const State& s) {
    const auto at = [&](const ops::QueryRows& q, int64_t row) {
      const int64_t head = row % tile.num_heads;
      return q.data +
             (row / tile.num_heads * q.row_stride + head * q.head_stride) * size_of(q.dtype);
    };
    const auto load = [&](const ops::QueryRows& q, int64_t row, float* to) {
      if (row + kAhead < s.rows) prefetch<0>(at(q, row + kAhead), q.dims * size_of(q.dtype));
      to_floats(at(q, row), q.dtype, q.dims, to);
    };
    Math::fill(s.row, s.dim_qk, 0.0f);
    for (int64_t row = 0; row < s.rows; ++row) {
      load(tile.q, row, s.row);
      if (tile.q_rope.dims > 0) load(tile.q_rope, row, s.row + tile.q.dims);
      for (int64_t d = 0; d < s.dim_qk; d += 16) {
        Math::store_factor(V::load(s.row + d), s.q + row * s.dim_qk, d);
      }
    }
  }

  // `count` bits of the mask, at most 64, from bit `first` on.
  static uint64_t mask_bits(const ListAttentionTile& tile, int64_t first, int64_t count) {
    const int64_t begin = first / 8;
    const int64_t end =
        (first + count + 7) / 8 < tile.mask_bytes ? (first + count + 7) / 8 : tile.mask_bytes;
    const int64_t shift = first % 8;
    uint64_t bits = 0;
    for (int64_t i = begin; i < end && i < begin + 8; ++i) {
      bits |= uint64_t{tile.mask[i]} << (i - begin) * 8;
    }
    bits >>= shift;
    if (end - begin > 8) bits |= uint64_t{tile.mask[begin + 8]} << (64 - shift);
    return bits & Math::token_bits(0, count);
  }

  // Which of the unit's tokens a row of the tile sees.
  static uint64_t visible(const ListAttentionTile& tile, const ListUnit& unit, int64_t row) {
    const int64_t position = tile.position + row;
    uint64_t seen = 0;
    for (int i = 0; i < unit.num_runs; ++i) {
      const TokenRun& run = unit.runs[i];
      const int64_t past = position - run.position + 1;  // of the run's tokens, how many
      int64_t begin = 0;
      int64_t end = run.count;
      if (tile.causal && past < end) end = past;
      if (tile.window_left >= 0) begin = past - 1 - tile.window_left;
      if (begin < 0) begin = 0;
      if (end <= begin) continue;
      uint64_t bits = Math::token_bits(begin, end);
      if (tile.mask != nullptr) {
        bits &=
            mask_bits(tile, run.mask_bit + (tile.list_row + row) * tile.mask_row_stride, run.count);
      }
      seen |= bits << run.slot;
    }
    return seen;
  }

  static void softmax_row(const ListAttentionTile& tile, const State& s, const ListUnit& unit,
                          int64_t row, TokenRange all) {
    const int64_t token = row / tile.num_heads;
    const V scale = V::set(tile.sm_scale);
    const float slope =
        tile.alibi_slopes != nullptr ? tile.alibi_slopes[row % tile.num_heads] : 0.0f;
    const V position = V::set(static_cast<float>(tile.position + token));
    const auto adjust = [&](V x, int64_t t) __attribute__((always_inline)) {
      x = x * scale;
      if (tile.k.scales != nullptr) x = x * V::load(unit.k_scales + t);
      if (tile.soft_cap > 0.0f) {
        const V cap = V::set(tile.soft_cap);
        x = tanh(x / cap) * cap;
      }
      if (tile.alibi_slopes != nullptr) {
        x = fma(V::set(slope), V::load(unit.positions + t) - position, x);
      }
      return x;
    };
    const auto weigh = [&](V p, int64_t t) __attribute__((always_inline)) {
      return tile.v.scales != nullptr ? p * V::load(unit.v_scales + t) : p;
    };
    Math::softmax_row(s.scores + row * kUnit, all, s.seen[token], s.max[row], s.sum[row],
                      s.factors[row], adjust, weigh);
  }

  // `next` is being fetched meanwhile. Rows that see nothing of the unit stay as they are, which is
  // what folding nothing into them would leave.
  static void do_unit(const ListAttentionTile& tile, const State& s, const ListUnit& unit,
                      const ListUnit& next) {
    uint64_t any = 0;
    int64_t first_row = tile.num_rows;
    int64_t end_row = 0;
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      s.seen[row] = visible(tile, unit, row);
      any |= s.seen[row];
      if (s.seen[row] == 0) continue;
      if (first_row > row) first_row = row;
      end_row = row + 1;
    }
    if (any == 0) return;
    const bool gathers_values = !s.direct && !(P == 1 && in_place(tile.v));
    if (!s.direct) Gather::pack_keys(tile, unit, next, s.buffers);
    if (gathers_values) Gather::pack_values(tile, unit, next, s.buffers);
    const TokenRange keys = {__builtin_ctzll(any), 64 - __builtin_clzll(any)};
    const TokenRange groups = {keys.begin / 16 * 16, (keys.end + 15) / 16 * 16};
    const int64_t first = first_row * tile.num_heads;
    const int64_t rows = (end_row - first_row) * tile.num_heads;
    if (s.direct) {
      score_rows(tile, s, unit, next, groups, first, rows);
    } else {
      score_lines(s, groups, first, rows);
    }
    for (int64_t row = first; row < first + rows; ++row) softmax_row(tile, s, unit, row, groups);
    if (gathers_values) {
      add_lines(s, keys, first, rows);
    } else {
      add_rows(tile, s, unit, next, keys, first, rows);
    }
  }

  // Scores of rows [first, first + rows) of the tile with groups of 16 tokens of the gathered unit.
  static void score_lines(const State& s, TokenRange groups, int64_t first, int64_t rows) {
    const int64_t lines = s.dim_qk / P;  // of 16 tokens
    const uint8_t* k = s.buffers.keys + groups.begin / 16 * lines * kLine;
    Math::product_all(Math::factors_at(s.q + first * s.dim_qk, 0), s.dim_qk,
                      {k, kLine, lines * kLine, k}, s.dim_qk, nullptr,
                      s.scores + first * kUnit + groups.begin, kUnit,
                      (groups.end - groups.begin) / 16, rows);
  }

  // The same with the unit's keys where they lie.
  static void score_rows(const ListAttentionTile& tile, const State& s, const ListUnit& unit,
                         const ListUnit& next, TokenRange groups, int64_t first, int64_t rows) {
    for (int64_t t = groups.begin; t < groups.end; t += 16) {
      in_parts(rows, [&]<int R>(int64_t row) {
        const float* q = s.q + (first + row) * s.dim_qk;
        float* scores = s.scores + (first + row) * kUnit + t;
        Rows::template scores<R>({Math::factors_at(q, 0), s.dim_qk}, {unit.k + t, next.k + t},
                                 tile.k.dims, false, scores, kUnit);
        if (tile.k_rope.dims == 0) return;
        Rows::template scores<R>({Math::factors_at(q, tile.k.dims), s.dim_qk},
                                 {unit.k_rope + t, next.k_rope + t}, tile.k_rope.dims, true, scores,
                                 kUnit);
      });
    }
  }

  // Adds probabilities times values to the output of rows [first, first + rows): of the gathered
  // unit,
  static void add_lines(const State& s, TokenRange keys, int64_t first, int64_t rows) {
    const int64_t lines = s.dim_vo / 16;  // of P tokens
    const int64_t step = keys.begin / P * P;
    const uint8_t* v = s.buffers.values + step / P * lines * kLine;
    Math::product_all(Math::factors_at(s.scores + first * kUnit, step), kUnit,
                      {v, lines * kLine, kLine, v}, keys.end - step, s.factors + first,
                      s.out + first * s.dim_vo, s.dim_vo, lines, rows);
  }

  // or where they lie.
  static void add_rows(const ListAttentionTile& tile, const State& s, const ListUnit& unit,
                       const ListUnit& next, TokenRange keys, int64_t first, int64_t rows) {
    const int64_t begin = keys.begin / P * P;
    const typename Rows::Rows values = {unit.v + begin, next.v + begin};
    for (int64_t column = 0; column < tile.v.dims; column += 64) {
      const int64_t width = tile.v.dims - column < 64 ? tile.v.dims - column : 64;
      in_parts(rows, [&]<int R>(int64_t part) {
        const int64_t row = first + part;
        const typename Rows::Factors factors = {Math::factors_at(s.scores + row * kUnit, begin),
                                                kUnit};
        const auto outputs =
            part == 0 ? Rows::template outputs<R, true> : Rows::template outputs<R, false>;
        outputs(factors, values, keys.end - begin, column, width, s.factors + row,
                s.out + row * s.dim_vo, s.dim_vo);
      });
    }
  }

  // part<R>(row): rows [row, row + R).
  template <class Part>
  static void in_parts(int64_t rows, Part&& part) {
    int64_t row = 0;
    const auto take = [&]<int R>() {
      part.template operator()<R>(row);
      row += R;
    };
    while (row < rows) {
      const int64_t left = rows - row;
      if (left == 6 || left >= 9) {
        take.template operator()<6>();
      } else if (left == 5) {
        take.template operator()<5>();
      } else if (left >= 4) {
        take.template operator()<4>();
      } else if (left == 3) {
        take.template operator()<3>();
      } else if (left == 2) {
        take.template operator()<2>();
      } else {
        take.template operator()<1>();
      }
    }
  }

  static uint8_t* out_row(const ListAttentionTile& tile, int64_t row) {
    const int64_t at =
        row / tile.num_heads * tile.out_row_stride + row % tile.num_heads * tile.v.dims;
    return tile.out + at * size_of(tile.out_dtype);
  }

  // A row that sees no key is zeros, and the logarithm of its sum minus infinity.
  static void write_row(const ListAttentionTile& tile, int64_t row, const float* values, float max,
                        float sum) {
    const int64_t token = row / tile.num_heads;
    const int64_t head = row % tile.num_heads;
    float scale = tile.v_scale;
    if (tile.sinks != nullptr) {
      const float sink = tile.sinks[head];
      const float highest = sink > max ? sink : max;
      const float kept = Math::first_lane(exp(V::set(max - highest)));
      sum = sum * kept + Math::first_lane(exp(V::set(sink - highest)));
      scale *= kept;
      max = highest;
    }
    const V factor = V::set(scale / (sum == 0.0f ? 1.0f : sum));
    from_floats(values, factor, tile.out_dtype, tile.v.dims, out_row(tile, row));
    if (tile.lse == nullptr) return;
    tile.lse[token * tile.lse_row_stride + head] =
        sum == 0.0f ? -__builtin_inff() : (max + __builtin_logf(sum)) * tile.lse_factor;
  }

  static void write(const ListAttentionTile& tile, const State& s, float* values, const float* max,
                    const float* sum) {
    for (int64_t row = 0; row < s.rows; ++row) {
      if (row + kAhead < s.rows) {
        prefetch<1>(out_row(tile, row + kAhead), tile.v.dims * size_of(tile.out_dtype));
      }
      write_row(tile, row, values + row * s.dim_vo, max[row], sum[row]);
    }
  }

  // The result of the chunk at hand is the tile's partial `index`.
  static void write_partial(const ListAttentionTile& tile, const State& s, int64_t index) {
    float* out = tile.partial_out + index * s.rows * s.dim_vo;
    float* ms = tile.partial_ms + index * s.rows * 2;
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

  static void clear(const State& s, float* out, float* max, float* sum) {
    Math::fill(out, s.rows * s.dim_vo, 0.0f);
    Math::fill(max, s.rows, kNoScore);
    Math::fill(sum, s.rows, 0.0f);
  }

  // The first unit of what comes after the tile.
  static void find_following(const ListAttentionTile& tile, const State& s, ListUnit& unit) {
    const ListAttentionTile* following = tile.following(tile.context);
    if (following != nullptr) ListWalk(*following, s.buffers.zeros).next(unit);
  }

  static void run_tile(const ListAttentionTile& tile) {
    const State s = make_state(tile);
    load_queries(tile, s);
    const auto chunk = [&](int32_t unit) { return (unit + tile.phase) / ops::kChunkUnits; };
    clear(s, s.out, s.max, s.sum);
    const bool splits = tile.partial_out != nullptr;
    const bool folds = !splits && tile.first_unit < tile.end_unit &&
                       chunk(tile.first_unit) != chunk(tile.end_unit - 1);
    if (folds) clear(s, s.total, s.total_max, s.total_sum);
    ListUnit units[2];
    ListWalk walk(tile, s.buffers.zeros);
    walk.next(units[0]);
    for (int32_t i = tile.first_unit; i < tile.end_unit; ++i) {
      const ListUnit& unit = units[(i - tile.first_unit) % 2];
      ListUnit& next = units[(i - tile.first_unit + 1) % 2];
      walk.next(next);
      if (i + 1 == tile.end_unit) find_following(tile, s, next);
      do_unit(tile, s, unit, next);
      if (i + 1 < tile.end_unit && chunk(i) == chunk(i + 1)) continue;
      if (splits) write_partial(tile, s, chunk(i) - chunk(tile.first_unit));
      if (folds) fold_chunk(s);
      if (i + 1 < tile.end_unit) clear(s, s.out, s.max, s.sum);
    }
    if (folds) {
      write(tile, s, s.total, s.total_max, s.total_sum);
    } else if (!splits) {
      write(tile, s, s.out, s.max, s.sum);
    }
  }

  static void run_merge(const ListAttentionTile& tile, const ListAttentionMerge& merge) {
    const int64_t rows = int64_t{tile.num_rows} * tile.num_heads;
    const int64_t dim = round_up_16(tile.v.dims);
    auto* values = reinterpret_cast<float*>(tile.scratch);
    for (int64_t row = 0; row < rows; ++row) {
      float max = kNoScore;
      float sum = 0.0f;
      Math::fill(values, dim, 0.0f);
      for (int64_t i = 0; i < merge.num_partials; ++i) {
        const int64_t partial = i * rows + row;
        Math::fold(max, sum, values, merge.partial_ms[2 * partial],
                   merge.partial_ms[2 * partial + 1], merge.partial_out + partial * dim, dim);
      }
      write_row(tile, row, values, max, sum);
    }
  }
};

// The kernel of a level from its KV views: 8-bit keys and values are gathered as bfloat16, exactly.
template <class F32, class F16, class Bf16, class Pack>
void list_attention_tile(const ListAttentionTile& tile) {
  switch (tile.k.dtype) {
    case DType::f32:
      return ListAttentionBody<F32, Pack>::run_tile(tile);
    case DType::f16:
      return ListAttentionBody<F16, Pack>::run_tile(tile);
    default:
      return ListAttentionBody<Bf16, Pack>::run_tile(tile);
  }
}

}  // namespace effinfer::cpu::simd
