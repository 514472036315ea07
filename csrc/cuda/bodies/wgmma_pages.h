// How the engine's pages become B operands of wgmma on their way to shared memory.
//
// A stage is 128 tokens of keys or of values, in rows of 128 bytes that are swizzled, with k along
// them: a row of keys is a token, its k are dims; a row of values is a dim, its k are tokens.
//
//   keys     2 (1 at heads of 64) x [128 tokens][64 dims]
//   values   2 x [dims][64 tokens]
//
// Four loads of 16 bytes are 4 x 4 dwords: of keys 4 tokens x 8 dims, of values 4 dims x 8 tokens
// (ops/kv_layout.h). Word j of each of them are the 16 bytes of a row's piece: nothing is shuffled.
// Rows and k are named as bodies/fragments.h names columns and k of mma.m16n8k16:
//
//   row 8 i + c of 32 tokens, or of 32 dims, is number 4 c + i of them
//   piece 2 s + p of 32 tokens (16 bytes of a row of values) are the pairs 4 q + 2 s + p, q = 0..3
//
// so that a lane's sums are those that mma gives it, 8 tokens or dims next to each other, and its
// weights A operands as they are.
//
// A page that is re-arranged once for many tiles (bodies/arrange_pages.h) has the same bytes in
// global memory, from where they are copied in pieces: half a tile of keys each, a tile of values.
//
//   2 (1) x [64 tokens][64 dims] of keys, then [dims][64 tokens] of values
//
// A warp has a quarter of each stage, 32 tokens. Eight lanes store pieces of eight rows at a time,
// which the swizzle puts into different banks. Two times four loads of a lane are under way: 16 KB
// of a warpgroup.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/fragments.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kStepTokens = 128;  // of a stage: half a chunk
inline constexpr int kSwizzledBytes = 128;

// Where a ring goes on, in one register.
template <int kPlaces>
struct RingPlace {
  static_assert((kPlaces & (kPlaces - 1)) == 0);
  uint32_t count = 0;
  EFFINFER_DEVICE int index() const { return static_cast<int>(count % kPlaces); }
  EFFINFER_DEVICE int parity() const { return static_cast<int>(count / kPlaces % 2); }
};

// What a lane of producing warp `warp` (of four) loads and stores.
template <int kColumns>
class PageTiles {
 public:
  static constexpr int kDims = kColumns * kBlock;
  static constexpr int kStageBytes = kStepTokens * kDims * 2;
  static constexpr int kKeyTile = kStepTokens * kSwizzledBytes;  // of 64 dims
  static constexpr int kValueTile = kDims * kSwizzledBytes;      // of 64 tokens
  static constexpr int kGroups = kColumns;                       // of four loads, of a stage
  static constexpr int kPageBytes = kStageBytes / 2;             // of keys, or of values
  using Group = Quad[4];

  EFFINFER_DEVICE PageTiles(int lane, int warp, const ops::AttentionProblem& p, int32_t kv_head)
      : p_(p) {
    const int c = lane % 8;
    const int x = lane / 8;
    const int half = warp % 2;  // of a page
    const int column = x % kColumns;
    const int first_pair = kColumns == 2 ? x / 2 : 0;
    key_ =
        static_cast<uint32_t>(kv_head * p.k.head_stride + (2 * half + c / 4) * (kDims / 2 * kLine) +
                              c % 4 * 16 + 4 * x * kLine);
    value_ =
        static_cast<uint32_t>(kv_head * p.v.head_stride + (16 * half + first_pair) * kPairBytes +
                              (column * kBlock + 4 * c) * 4);
    key_to_ = static_cast<uint32_t>((warp * kBlock + c) * kSwizzledBytes + (x ^ c) * 16);
    value_to_ = static_cast<uint32_t>(warp / 2 * kValueTile + (column * kBlock + c) * 128 +
                                      ((4 * half + first_pair) ^ c) * 16);
  }

  // Where the lane begins to load of a page.
  EFFINFER_DEVICE const uint8_t* begin(bool of_values, int32_t page) const {
    return of_values ? p_.v.page(page) + value_ : p_.k.page(page) + key_;
  }

  // Group `group` of the lane's loads.
  template <class Unit>
  EFFINFER_DEVICE static void load(Unit& unit, bool of_values, const uint8_t* from, int group,
                                   Group& to) {
    if (of_values) {
      load_four(unit, from + group * (kPairs * kPairBytes), 4 * kPairBytes, to);
    } else {
      load_four(unit, from + group * (16 * kLine), kLine, to);
    }
  }

  // To a stage, or to a page's own place, where tiles of keys are half as long.
  EFFINFER_DEVICE void store(bool of_values, const Group& from, int group, uint8_t* to,
                             int key_tile = kKeyTile) const {
    if (of_values) {
      store_four(from, to + (value_to_ ^ static_cast<uint32_t>(group * (kPairs * 16))));
    } else {
      to += group / 2 * key_tile;
      store_four(from, to + (key_to_ ^ static_cast<uint32_t>(group % 2 * 64)));
    }
  }

 private:
  static constexpr int kLine = 64;              // bytes of a page
  static constexpr int kPairBytes = kDims * 4;  // of two tokens of values
  static constexpr int kPairs = 4 / kColumns;   // that a group of values is apart

  template <class Unit>
  EFFINFER_DEVICE static void load_four(Unit& unit, const uint8_t* from, int step, Group& to) {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) to[i] = unit.load(reinterpret_cast<const Quad*>(from + i * step));
  }
  EFFINFER_DEVICE static void store_four(const Group& from, uint8_t* to) {
    EFFINFER_UNROLL
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<Quad*>(to + j * 8 * kSwizzledBytes) = {
          {from[0].words[j], from[1].words[j], from[2].words[j], from[3].words[j]}};
    }
  }

  const ops::AttentionProblem& p_;
  uint32_t key_;  // bytes from a page's begin, from a stage's begin
  uint32_t value_;
  uint32_t key_to_;
  uint32_t value_to_;
};

}  // namespace effinfer::cuda
