// Keys and values of a caller, in any layout, as a source of units: 64 visited tokens at a time,
// gathered into the order of the products; tiles of few rows multiply them where they lie. The next
// unit's rows are fetched meanwhile.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "core/float8.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/key_unit.h"
#include "cpu/vectors/row_products.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// A unit and where its rows lie.
struct RowUnit : KeyUnit {
  int32_t chunk;  // TokenWalk::kEnd: no unit
  const uint8_t* k[kUnit];
  const uint8_t* k_rope[kUnit];
  const uint8_t* v[kUnit];
  float k_scales[kUnit];
  float v_scales[kUnit];
};

// The units of a task, one after the other.
class RowWalk {
 public:
  // `zeros` is the row of empty slots.
  RowWalk(const AttentionTask& task, const uint8_t* zeros)
      : task_(task), zeros_(zeros), walk_(task) {}

  void next(RowUnit& unit) {
    unit.clear();
    unit.chunk = walk_.chunk();
    while (unit.count < kUnit && unit.chunk != TokenWalk::kEnd && walk_.chunk() == unit.chunk) {
      const TokenRun run = walk_.next(unit.count, kUnit - unit.count);
      unit.add(run);
      locate(unit, run);
      if (task_.spans == nullptr && task_.words == nullptr) break;  // units of the sequence
    }
    for (int32_t slot = unit.count; slot < kUnit; ++slot) {
      unit.k[slot] = unit.k_rope[slot] = unit.v[slot] = zeros_;
      unit.k_scales[slot] = unit.v_scales[slot] = 0.0f;
    }
  }

 private:
  void locate(RowUnit& unit, const TokenRun& run) const {
    int64_t page = 0;
    int64_t offset = task_.first_token + run.position;
    const int32_t* id = nullptr;
    if (task_.pages != nullptr) {
      id = task_.pages + run.position / task_.page_size;
      page = *id;
      offset = run.position % task_.page_size;
    }
    for (int32_t i = 0; i < run.count; ++i) {
      const int32_t slot = run.slot + i;
      unit.k[slot] = address(task_.k, page, offset);
      unit.v[slot] = address(task_.v, page, offset);
      if (task_.k_rope.dims > 0) unit.k_rope[slot] = address(task_.k_rope, page, offset);
      if (task_.k.scales != nullptr) unit.k_scales[slot] = scale(task_.k, page, offset);
      if (task_.v.scales != nullptr) unit.v_scales[slot] = scale(task_.v, page, offset);
      if (++offset < task_.page_size || id == nullptr || i + 1 == run.count) continue;
      page = *++id;
      offset = 0;
    }
  }
  static const uint8_t* address(const ops::KvRows& rows, int64_t page, int64_t offset) {
    return rows.data + page * rows.page_stride + offset * rows.token_stride;
  }
  static float scale(const ops::KvRows& rows, int64_t page, int64_t offset) {
    return rows.scales[page * rows.scale_page_stride + offset * rows.scale_token_stride];
  }

  const AttentionTask& task_;
  const uint8_t* zeros_;
  TokenWalk walk_;
};

// Takes the rows of a unit into lines.
template <class Kv, class Pack>
struct RowGather {
  static constexpr int P = Kv::P;
  static constexpr int64_t kElement = 4 / P;  // bytes of a gathered element

  struct Buffers {
    uint8_t* keys;    // [64 / 16][dim_qk / P] lines
    uint8_t* values;  // [64 / P][dim_vo / 16] lines
    uint8_t* rows;    // 16 rows on their way
    const uint8_t* zeros;
  };

  static void pack_keys(const AttentionTask& task, const RowUnit& unit, const RowUnit& next,
                        const Buffers& buffers) {
    const int64_t key_lines = round_up_16(task.k.dims + task.k_rope.dims) / P;
    const int32_t groups = (unit.count + 15) / 16;
    for (int32_t group = 0; group < groups; ++group) {
      uint8_t* lines = buffers.keys + group * key_lines * 64;
      pack_keys(task.k, unit.k, next.k, group, buffers, lines);
      if (task.k_rope.dims == 0) continue;
      pack_keys(task.k_rope, unit.k_rope, next.k_rope, group, buffers,
                lines + task.k.dims / P * 64);
    }
  }

  static void pack_values(const AttentionTask& task, const RowUnit& unit, const RowUnit& next,
                          const Buffers& buffers) {
    const int64_t row_bytes = round_up_16(task.v.dims) * kElement;
    for (int32_t t = 0; t < unit.count; t += P) {
      const uint8_t* pair[2] = {};
      for (int i = 0; i < P; ++i) {
        pair[i] = row(task.v, unit.v[t + i], buffers.rows + i * row_bytes);
        prefetch(next.v[t + i], task.v);
      }
      uint8_t* lines = buffers.values + t * row_bytes;
      if constexpr (P == 1) {
        __builtin_memcpy(lines, pair[0], static_cast<size_t>(row_bytes));
      } else {
        Pack::interleave(pair[0], pair[1], round_up_16(task.v.dims), lines);
      }
    }
  }

 private:
  static void pack_keys(const ops::KvRows& k, const uint8_t* const* slots,
                        const uint8_t* const* next, int32_t group, const Buffers& buffers,
                        uint8_t* lines) {
    const int64_t row_bytes = round_up_16(k.dims) * kElement;
    const uint8_t* rows[16];
    for (int i = 0; i < 16; ++i) {
      const int32_t slot = group * 16 + i;
      rows[i] = row(k, slots[slot], buffers.rows + i * row_bytes);
      prefetch(next[slot], k);
    }
    Pack::transpose(rows, 0, row_bytes / 4, lines);
  }

  // The next unit's rows come while this one's are in use.
  static void prefetch(const uint8_t* row, const ops::KvRows& rows) {
    const int64_t bytes = rows.dims * size(rows.dtype);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
    __builtin_prefetch(row + bytes - 1, 0, 2);  // rows need not begin with a line
  }
  static int64_t size(DType dtype) {
    return dtype == DType::f32 ? 4 : dtype == DType::f16 || dtype == DType::bf16 ? 2 : 1;
  }

  // The row as gathered elements, a multiple of 16 of them: where it lies, or converted.
  static const uint8_t* row(const ops::KvRows& rows, const uint8_t* from, uint8_t* to) {
    auto* bits = reinterpret_cast<uint16_t*>(to);
    const int64_t dims = rows.dims;
    if (rows.dtype == DType::i8) {
      const auto* values = reinterpret_cast<const int8_t*>(from);
      for (int64_t i = 0; i < dims; ++i) bits[i] = f32_to_bf16(static_cast<float>(values[i]));
    } else if (rows.dtype == DType::f8_e4m3) {
      for (int64_t i = 0; i < dims; ++i) bits[i] = f32_to_bf16(f8_e4m3_to_f32(from[i]));
    } else if (rows.dtype == DType::f8_e5m2) {
      for (int64_t i = 0; i < dims; ++i) bits[i] = f32_to_bf16(f8_e5m2_to_f32(from[i]));
    } else if (dims % 16 == 0) {
      return from;
    } else {
      __builtin_memcpy(to, from, static_cast<size_t>(dims * kElement));
    }
    const int64_t padding = round_up_16(dims) - dims;
    __builtin_memset(to + dims * kElement, 0, static_cast<size_t>(padding * kElement));
    return to;
  }
};

template <class Kv, class Pack, class Products>
class KeyRows {
 public:
  using Math = AttentionMath<Kv>;
  using Gather = RowGather<Kv, Pack>;
  using Rows = RowProducts<Kv, Pack>;
  static constexpr int P = Kv::P;
  static constexpr int64_t kLine = Math::kLine;
  // For up to so many rows keys and values are not gathered.
  static constexpr int64_t kDirectRows = 8;

  KeyRows(const AttentionTask& task, Products& products, float* memory)
      : task_(task),
        products_(products),
        dim_qk_(round_up_16(task.k.dims + task.k_rope.dims)),
        dim_vo_(round_up_16(task.v.dims)),
        direct_(!Products::kTiles && int64_t{task.num_rows} * task.num_heads <= kDirectRows &&
                in_place(task.k) && in_place(task.k_rope) && in_place(task.v)),
        gathers_values_(!direct_ && !(P == 1 && !Products::kTiles && in_place(task.v))),
        buffers_(take(memory)),
        walk_(task, buffers_.zeros) {
    walk_.next(units_[0]);
    find_next();
  }

  int32_t chunk() const { return units_[at_].chunk; }
  const KeyUnit& unit() const { return units_[at_]; }
  bool all_seen() const { return false; }
  void advance() {
    at_ = 1 - at_;
    has_keys_ = has_values_ = false;
    find_next();
  }

  // Scores of some rows of the tile with groups of 16 tokens of the unit.
  void score(const typename Math::A* q, int64_t dim, TokenRange groups, int64_t rows,
             float* scores) {
    if (direct_) return score_rows(q, dim, groups, rows, scores);
    if (!has_keys_) Gather::pack_keys(task_, units_[at_], units_[1 - at_], buffers_);
    has_keys_ = true;
    const int64_t lines = dim / P;  // of 16 tokens
    const uint8_t* k = buffers_.keys + groups.begin / 16 * lines * kLine;
    products_.multiply(q, dim, {k, kLine, lines * kLine, k}, dim, nullptr, scores + groups.begin,
                       kUnit, (groups.end - groups.begin) / 16, rows);
  }

  // Adds probabilities times values to the output of these rows.
  void add_values(const float* scores, int64_t dim, TokenRange keys, int64_t rows,
                  const float* factors, float* out) {
    if (!gathers_values_) return add_rows(scores, dim, keys, rows, factors, out);
    if (!has_values_) Gather::pack_values(task_, units_[at_], units_[1 - at_], buffers_);
    has_values_ = true;
    const int64_t lines = dim / 16;  // of P tokens
    const int64_t step = keys.begin / Products::kValueStep * Products::kValueStep;
    const uint8_t* v = buffers_.values + step / P * lines * kLine;
    products_.multiply(Math::factors_at(scores, step), kUnit, {v, lines * kLine, kLine, v},
                       keys.end - step, factors, out, dim, lines, rows);
  }

  const float* k_scales() const {
    return task_.k.scales != nullptr ? units_[at_].k_scales : nullptr;
  }
  // Weights are of the engine's pages.
  static const float* log_weights() { return nullptr; }
  static bool has_first() { return false; }
  const float* v_scales() const {
    return task_.v.scales != nullptr ? units_[at_].v_scales : nullptr;
  }

 private:
  // Whether rows are multiplied as they are: 8-bit numbers are converted while they are gathered.
  static bool in_place(const ops::KvRows& rows) {
    return rows.dims % 16 == 0 &&
           (rows.dtype == DType::f32 || rows.dtype == DType::f16 || rows.dtype == DType::bf16);
  }

  typename Gather::Buffers take(float* memory) const {
    const int64_t widest = (dim_qk_ > dim_vo_ ? dim_qk_ : dim_vo_) + 16;
    typename Gather::Buffers buffers;
    buffers.keys = reinterpret_cast<uint8_t*>(memory);
    buffers.values = reinterpret_cast<uint8_t*>(memory + kUnit * dim_qk_);
    float* next = memory + kUnit * (dim_qk_ + dim_vo_);
    Math::fill(next, widest, 0.0f);
    buffers.zeros = reinterpret_cast<uint8_t*>(next);
    buffers.rows = reinterpret_cast<uint8_t*>(next + widest);
    return buffers;
  }

  // Behind a task's last unit: the first one of what comes after the task.
  void find_next() {
    RowUnit& next = units_[1 - at_];
    if (units_[at_].chunk == TokenWalk::kEnd) return;
    walk_.next(next);
    if (next.chunk != TokenWalk::kEnd || task_.following == nullptr) return;
    const AttentionTask* following = task_.following(task_.context);
    if (following != nullptr) RowWalk(*following, buffers_.zeros).next(next);
    next.chunk = TokenWalk::kEnd;
  }

  void score_rows(const typename Math::A* q, int64_t dim, TokenRange groups, int64_t rows,
                  float* scores) const {
    const RowUnit& unit = units_[at_];
    const RowUnit& next = units_[1 - at_];
    for (int64_t t = groups.begin; t < groups.end; t += 16) {
      in_parts(rows, [&]<int R>(int64_t row) {
        const auto* from = reinterpret_cast<const float*>(q) + row * dim;
        float* to = scores + row * kUnit + t;
        Rows::template scores<R>({Math::factors_at(from, 0), dim}, {unit.k + t, next.k + t},
                                 task_.k.dims, false, to, kUnit);
        if (task_.k_rope.dims == 0) return;
        Rows::template scores<R>({Math::factors_at(from, task_.k.dims), dim},
                                 {unit.k_rope + t, next.k_rope + t}, task_.k_rope.dims, true, to,
                                 kUnit);
      });
    }
  }

  void add_rows(const float* scores, int64_t dim, TokenRange keys, int64_t rows,
                const float* factors, float* out) const {
    const int64_t begin = keys.begin / P * P;
    const typename Rows::Rows values = {units_[at_].v + begin, units_[1 - at_].v + begin};
    for (int64_t column = 0; column < task_.v.dims; column += 64) {
      const int64_t width = task_.v.dims - column < 64 ? task_.v.dims - column : 64;
      in_parts(rows, [&]<int R>(int64_t row) {
        const typename Rows::Factors a = {Math::factors_at(scores + row * kUnit, begin), kUnit};
        const auto outputs =
            row == 0 ? Rows::template outputs<R, true> : Rows::template outputs<R, false>;
        outputs(a, values, keys.end - begin, column, width, factors + row, out + row * dim, dim);
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

  const AttentionTask& task_;
  Products& products_;
  const int64_t dim_qk_;
  const int64_t dim_vo_;
  const bool direct_;          // keys and values are multiplied where they lie,
  const bool gathers_values_;  // and float32 values always, as their rows are lines already
  const typename Gather::Buffers buffers_;
  RowWalk walk_;
  RowUnit units_[2];
  int at_ = 0;
  bool has_keys_ = false;  // of the unit at hand, gathered
  bool has_values_ = false;
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
