// The shared memory of decoding's attention.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/attention_fetch.h"
#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/fragments.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// Where keys and values are to be that lanes copy (bodies/attention_ring.h).
template <DType kType, int kWarps>
struct AttentionRings {
  // 12 KB of copies under way for each warp, or of eight warps half as many, for which the blocks
  // of all GPUs have room: blocks of float32 are as large as two of 16-bit numbers, of int8 half.
  static constexpr int kFull = kType == DType::f32 ? 4 : 8;
  static constexpr int kRing = kWarps == 8 && kType != DType::i8 ? kFull / 2 : kFull;
  static constexpr int kBlocks = 8 / kWarps;

  typename Fetch<kType>::Slot slots[kWarps][kRing];
  std::conditional_t<KvBlock<kType>::kScaled, typename Fetch<kType>::Scales[kWarps][kBlocks], char>
      scales;
};

template <DType kType, int kWarps>
struct AttentionShared {
  using Rings = AttentionRings<kType, kWarps>;
  static constexpr int kPasses = 3;  // before, at hand, next: warps are in two of them at once
  static constexpr int kBlocks = 8 / kWarps;  // of tokens, that a warp has scores of

  typename Products<kType, kWarps>::Operands operands;
  typename ChunkSoftmax<kWarps>::Shared softmax;
  // What all threads read now and then, and no register is kept for.
  Fetch<kType> fetch;
  ops::AttentionItem item;
  ops::AttentionTile tile;
  ItemUnits units;
  Visibility visible;
  PlainPlaces plain;
  TileRow rows[kTileRows];
  ChunkPass passes[kPasses];
  // Of copies of whole pages (bodies/attention_pages.h), which then come to where rings would be,
  // and beyond.
  Mbarrier keys_full[kChunkUnits];
  Mbarrier values_full[kChunkUnits];
  Mbarrier values_read[kChunkUnits];
  alignas(kType == DType::f32 ? 16 : 128) Rings rings;
};

}  // namespace effinfer::cuda
