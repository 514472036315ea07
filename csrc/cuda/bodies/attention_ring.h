// A warp's blocks of keys and values on their way, in the order in which they are multiplied.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/attention_fetch.h"
#include "cuda/bodies/attention_merge.h"
#include "cuda/bodies/fragments.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

template <DType kType, int kWarps>
struct AttentionShared {
  // 14 KB of copies under way for each warp, or of eight warps half as many, for which the blocks
  // of all GPUs have room: blocks of float32 are as large as two of 16-bit numbers, of int8 half.
  static constexpr int kFull = kType == DType::f32 ? 4 : 8;
  static constexpr int kRing = kWarps == 8 && kType != DType::i8 ? kFull / 2 : kFull;
  static constexpr int kBlocks = 8 / kWarps;  // of tokens, that a warp has scores of

  using RingSlots = typename Fetch<kType>::Slot[kWarps][kRing];
  using Merge = MergeShared<kWarps, static_cast<int>(sizeof(RingSlots))>;

  union {
    RingSlots ring;
    Merge merge;  // when the ring is empty for good
  };
  std::conditional_t<KvBlock<kType>::kScaled, typename Fetch<kType>::Scales[kWarps][kBlocks], char>
      scales;
  typename Products<kType, kWarps>::Operands operands;
  typename ChunkSoftmax<kWarps>::Shared softmax;
  // What all threads read now and then, and no register is kept for.
  Fetch<kType> fetch;
  ops::AttentionItem item;
  ops::AttentionTile tile;
  ItemUnits units;
  Visibility visible;
  TileRow rows[kTileRows];
  ChunkPass passes[2];  // at hand, and next
  int32_t is_last;
};

// A ring of the warp's own, whose parts come without a barrier: of a pass each of the warp's blocks
// of tokens, column by column of dims, then all 8 blocks of its own dims of values.
template <class Unit, DType kType, int kWarps>
class BlockRing {
 public:
  using Shared = AttentionShared<kType, kWarps>;
  static constexpr int kBlocks = Shared::kBlocks;
  static constexpr int kRing = Shared::kRing;
  static constexpr int kAhead = kRing - 1;

  EFFINFER_DEVICE BlockRing(Unit& unit, Shared& shared, int dims)
      : unit_(unit), shared_(shared), columns_((dims + kBlock - 1) / kBlock) {}

  EFFINFER_DEVICE int columns() const { return columns_; }

  // The next part has come, if it `waits` for one, and another is on its way to its predecessor's
  // place. The first kAhead times nobody waits.
  EFFINFER_DEVICE const typename Fetch<kType>::Slot& take(const ChunkPass& now,
                                                          const ChunkPass& next, bool waits) {
    if (waits) {
      unit_.template wait<kAhead - 1>();
      unit_.sync_warp();  // of all lanes; and all have read what the next copies replace
    }
    fetch(ahead_.in_next ? next : now);
    return shared_.ring[unit_.warp][ahead_.slot];  // all but one are ahead of it
  }

  // What was ahead in the next pass is ahead in the one at hand.
  EFFINFER_DEVICE void end_pass() { ahead_.in_next = false; }

 private:
  // The next part on its way.
  EFFINFER_DEVICE void fetch(const ChunkPass& pass) {
    auto& slot = shared_.ring[unit_.warp][ahead_.slot];
    const bool of_values = ahead_.block == kBlocks;
    if (pass.chunk >= 0) {
      const int index = of_values ? ahead_.column : unit_.warp * kBlocks + ahead_.block;
      const int column = of_values ? unit_.warp : ahead_.column;
      shared_.fetch.fetch(unit_, pass, of_values, index, column, slot);
      if constexpr (KvBlock<kType>::kScaled) {
        if (!of_values && column == 0) {
          auto& scales = shared_.scales[unit_.warp][ahead_.block];
          shared_.fetch.fetch_scales(unit_, pass, index, scales);
        }
      }
    }
    unit_.commit();
    ahead_.slot = (ahead_.slot + 1) % kRing;
    if (++ahead_.column < (of_values ? kChunkBlocks : columns_)) return;
    ahead_.column = 0;
    if (++ahead_.block <= kBlocks) return;
    ahead_.block = 0;
    ahead_.in_next = true;
  }

  Unit& unit_;
  Shared& shared_;
  const int columns_;  // of 32 dims
  // The next part to fetch: of the pass at hand, or already of the next one.
  struct {
    int slot = 0;
    int block = 0;  // of the warp's keys; kBlocks: values
    int column = 0;
    bool in_next = false;
  } ahead_;
};

}  // namespace effinfer::cuda
