// What the driver of the row index hands to an ISA level: the bounds of a page's keys, scores of
// units by bounds or of keys by their products, and what has the highest scores.
#pragma once

#include <cstdint>

#include "effinfer/dtype.h"
#include "ops/kv_layout.h"

namespace effinfer::cpu {

// The keys of a full page, of one KV head.
struct PageKeys {
  const uint8_t* k;
  const float* k_scale;  // i8 only
};
PageKeys keys_of(const ops::KvLayer& kv, int64_t page, int64_t head);
// Why its keys can not be scored or hashed; null: they can.
const char* rejects_keys(const ops::KvLayer& kv);

struct KeyShape {
  DType dtype;
  int32_t head_dim;
};

// The query heads of one row and KV head.
struct RowQueries {
  const float* q;  // [group][head_dim]
  int32_t group;
  int32_t head_dim;
  float sm_scale;
};

struct UnitScoreTile {
  RowQueries queries;
  int64_t num_units;
  const uint16_t* const* bounds;  // or means, of each unit, as ops::PageBounds has them
  float* scores;                  // [group][padded_scores(num_units)]
  float* scratch;                 // score_scratch_floats()
};

struct KeyScoreTile {
  RowQueries queries;
  int64_t num_pages;
  DType dtype;
  const PageKeys* pages;    // [num_pages]
  const int32_t* channels;  // ascending
  int32_t num_channels;     // 0: all
  float* scores;            // [group][64 * num_pages]
  float* scratch;           // score_scratch_floats()
};

struct PageIndexKernels {
  // Of the units of a page, 16, 32 or 64 keys each.
  void (*bound)(const KeyShape&, const PageKeys&, int64_t unit, uint16_t* out);
  // Of 16 keys each.
  void (*average)(const KeyShape&, const PageKeys&, uint16_t* out);
  void (*score_units)(const UnitScoreTile&);
  void (*score_means)(const UnitScoreTile&);
  // Of windows of two units with means, one fewer than units: what is behind them has no score.
  void (*score_windows)(const UnitScoreTile&);
  void (*score_keys)(const KeyScoreTile&);
  // The scores of heads, [group][padded_scores(count)], to those of what they vote for, in the
  // first row: after each head's softmax the sum, or the logarithm of the highest.
  void (*vote)(float* scores, int64_t count, int64_t group, bool adds);
  // Sets the bits of the `kept` highest of scores, at least 1, the first among equals; of NaN none.
  // bits: [words_of(count)], zeros.
  void (*choose)(const float* scores, int64_t count, int64_t kept, uint64_t* bits);
};

inline constexpr int64_t padded_scores(int64_t count) {
  return (count + 15) / 16 * 16;
}
// What is positive of the queries, and what is negative; or the queries and lines of channels.
inline constexpr int64_t score_scratch_floats(int64_t group, int64_t head_dim) {
  return 2 * group * head_dim;
}

}  // namespace effinfer::cpu
