// Gathers listed tokens' keys and values, 64 at a time, into the order of the attention products.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "core/float8.h"
#include "cpu/list_attention.h"

namespace effinfer::cpu::simd {
namespace {

// Tokens of a unit that follow each other in their sequence.
struct TokenRun {
  int32_t slot;  // in the unit
  int32_t count;
  int32_t position;  // of the first one, in the sequence
  int64_t mask_bit;  // of the list's first row and the first token
};

struct ListUnit {
  int32_t count;  // tokens; the slots behind them are empty
  int32_t num_runs;
  TokenRun runs[ops::kUnitTokens];
  const uint8_t* k[ops::kUnitTokens];
  const uint8_t* k_rope[ops::kUnitTokens];
  const uint8_t* v[ops::kUnitTokens];
  float positions[ops::kUnitTokens];
  float k_scales[ops::kUnitTokens];
  float v_scales[ops::kUnitTokens];
};

// The units of an item, one after the other.
class ListWalk {
 public:
  // `zeros` is the row of empty slots.
  ListWalk(const ListAttentionTile& tile, const uint8_t* zeros) : tile_(tile), zeros_(zeros) {
    const int32_t skipped = tile.first_unit * ops::kUnitTokens;
    end_ = tile.end_unit * ops::kUnitTokens;
    if (end_ > tile.num_tokens) end_ = tile.num_tokens;
    at_ = skipped;
    int32_t low = 0;  // the last span that begins at or before `skipped`
    for (int32_t high = tile.num_spans; high - low > 1;) {
      const int32_t middle = low + (high - low) / 2;
      (tile.spans[middle].first <= skipped ? low : high) = middle;
    }
    span_ = low;
  }

  // Without tokens behind the last unit.
  void next(ListUnit& unit) {
    unit.count = 0;
    unit.num_runs = 0;
    while (unit.count < ops::kUnitTokens && at_ < end_) {
      const ops::TokenSpan& span = tile_.spans[span_];
      const int32_t begin = span.begin + (at_ - span.first);
      int32_t count = span.end - begin;
      if (count > ops::kUnitTokens - unit.count) count = ops::kUnitTokens - unit.count;
      if (count > end_ - at_) count = end_ - at_;
      unit.runs[unit.num_runs++] = {unit.count, count, begin, span.mask_bit + (begin - span.begin)};
      locate(unit, begin, count);
      unit.count += count;
      at_ += count;
      if (begin + count == span.end) ++span_;
    }
    for (int32_t slot = unit.count; slot < ops::kUnitTokens; ++slot) {
      unit.k[slot] = unit.k_rope[slot] = unit.v[slot] = zeros_;
    }
  }

 private:
  void locate(ListUnit& unit, int32_t begin, int32_t count) const {
    int64_t page = 0;
    int64_t offset = tile_.first_token + begin;
    const int32_t* id = nullptr;
    if (tile_.pages != nullptr) {
      id = tile_.pages + begin / tile_.page_size;
      page = *id;
      offset = begin % tile_.page_size;
    }
    for (int32_t i = 0; i < count; ++i) {
      const int32_t slot = unit.count + i;
      unit.k[slot] = address(tile_.k, page, offset);
      unit.v[slot] = address(tile_.v, page, offset);
      if (tile_.k_rope.dims > 0) unit.k_rope[slot] = address(tile_.k_rope, page, offset);
      if (tile_.k.scales != nullptr) unit.k_scales[slot] = scale(tile_.k, page, offset);
      if (tile_.v.scales != nullptr) unit.v_scales[slot] = scale(tile_.v, page, offset);
      unit.positions[slot] = static_cast<float>(begin + i);
      if (++offset < tile_.page_size || id == nullptr || i + 1 == count) continue;
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

  const ListAttentionTile& tile_;
  const uint8_t* zeros_;
  int32_t at_;  // of the list's tokens
  int32_t end_;
  int32_t span_;
};

template <class Kv, class Pack>
struct ListGather {
  static constexpr int P = Kv::P;
  static constexpr int64_t kElement = 4 / P;  // bytes of a gathered element

  struct Buffers {
    uint8_t* keys;    // [64 / 16][dim_qk / P] lines
    uint8_t* values;  // [64 / P][dim_vo / 16] lines
    uint8_t* rows;    // 16 rows on their way
    const uint8_t* zeros;
  };

  static void pack_keys(const ListAttentionTile& tile, const ListUnit& unit, const ListUnit& next,
                        const Buffers& buffers) {
    const int64_t key_lines = round_up_16(tile.k.dims + tile.k_rope.dims) / P;
    const int32_t groups = (unit.count + 15) / 16;
    for (int32_t group = 0; group < groups; ++group) {
      uint8_t* lines = buffers.keys + group * key_lines * 64;
      pack_keys(tile.k, unit.k, next.k, group, buffers, lines);
      if (tile.k_rope.dims == 0) continue;
      pack_keys(tile.k_rope, unit.k_rope, next.k_rope, group, buffers,
                lines + tile.k.dims / P * 64);
    }
  }

  static void pack_values(const ListAttentionTile& tile, const ListUnit& unit, const ListUnit& next,
                          const Buffers& buffers) {
    const int64_t row_bytes = round_up_16(tile.v.dims) * kElement;
    for (int32_t t = 0; t < unit.count; t += P) {
      const uint8_t* pair[2] = {};
      for (int i = 0; i < P; ++i) {
        pair[i] = row(tile.v, unit.v[t + i], buffers.rows + i * row_bytes);
        prefetch(next.v[t + i], tile.v);
      }
      uint8_t* lines = buffers.values + t * row_bytes;
      if constexpr (P == 1) {
        __builtin_memcpy(lines, pair[0], static_cast<size_t>(row_bytes));
      } else {
        Pack::interleave(pair[0], pair[1], round_up_16(tile.v.dims), lines);
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

}  // namespace
}  // namespace effinfer::cpu::simd
