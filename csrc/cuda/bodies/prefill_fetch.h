// A lane's part of the blocks of keys and values that the prefill kernel brings: as in
// bodies/attention_fetch.h, but what does not change within an item is added up once, and pages
// come from where the kernel's parameters are.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/fragments.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kLineBytes = 64;  // of a page

template <DType kType>
class PrefillFetch {
 public:
  using Block = KvBlock<kType>;
  using Slot = Quad[Block::kLoads][kWarp];
  using Scales = Quad[2][kChunkTokens / 4];  // of a chunk's keys, and of its values

  template <class Unit>
  EFFINFER_DEVICE PrefillFetch(Unit& unit, const ops::AttentionProblem& p,
                               const ops::AttentionTile& tile)
      : p_(p), kv_head_(tile.kv_head) {
    const int quad = Block::quad(unit.lane);
    const int key = Block::key_offset(4 * quad, Block::key_line(unit.lane, 0), p.k.dims);
    const int value = Block::value_offset(Block::value_group(unit.lane, 0), 4 * quad, p.k.dims);
    key_ = static_cast<uint32_t>(tile.kv_head * p.k.head_stride + key);
    value_ = static_cast<uint32_t>(tile.kv_head * p.v.head_stride + value);
  }

  // Half `half` of 32 tokens of a pass's page, `column` of 32 dims; nothing of what is not visited,
  // and behind the last dim.
  template <class Unit>
  EFFINFER_DEVICE void keys(Unit& unit, const ChunkPass& pass, int page, int half, int column,
                            Slot& to) const {
    if ((pass.units >> page & 1) == 0 || column * kBlock >= p_.k.dims) return;
    const uint8_t* from = p_.k.page(pass.pages[page]) + (key_ + half_bytes(half)) +
                          column * (kBlock / Block::P * kLineBytes);
    const bool is_half = p_.k.dims - column * kBlock < kBlock;
    EFFINFER_UNROLL
    for (int l = 0; l < Block::kLoads; ++l) {
      if (l == Block::kLoads / 2 && is_half) break;
      unit.copy_async(&to[l][unit.lane], from + l * Block::kKeyLines * kLineBytes);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE void values(Unit& unit, const ChunkPass& pass, int page, int half, int column,
                              Slot& to) const {
    // The second half of a block may lie behind the last dim: nobody looks at what becomes of it.
    const bool is_behind = column * kBlock + 4 * Block::quad(unit.lane) >= p_.k.dims;
    if ((pass.units >> page & 1) == 0 || is_behind) return;
    const uint8_t* from = p_.v.page(pass.pages[page]) + (value_ + half_bytes(half));
    EFFINFER_UNROLL
    for (int l = 0; l < Block::kLoads; ++l) {
      unit.copy_async(&to[l][unit.lane], from + column * (2 * kLineBytes));
      from += Block::kValueGroups * p_.k.dims * 4;
    }
  }

  // The scales of a pass's tokens, four for each of `threads` threads at a time.
  template <class Unit>
  EFFINFER_DEVICE void scales(Unit& unit, const ChunkPass& pass, int threads, Scales& to) const {
    constexpr int kQuads = kChunkTokens / 4;
    for (int i = unit.thread; i < 2 * kQuads; i += threads) {
      const ops::KvRows& rows = i >= kQuads ? p_.v : p_.k;
      const int tokens = i % kQuads * 4;
      const int at = tokens / kUnitTokens;
      if ((pass.units >> at & 1) == 0) continue;
      const float* from = rows.scales + pass.pages[at] * rows.scale_page_stride +
                          kv_head_ * rows.scale_head_stride + tokens % kUnitTokens;
      unit.copy_async(&to[i / kQuads][i % kQuads], from);
    }
  }

 private:
  EFFINFER_DEVICE uint32_t half_bytes(int half) const {
    return static_cast<uint32_t>(half * (kBlock * 4 / Block::P) * p_.k.dims);
  }

  const ops::AttentionProblem& p_;
  const int32_t kv_head_;
  uint32_t key_;  // bytes from a page's begin to the lane's first ones
  uint32_t value_;
};

}  // namespace effinfer::cuda
