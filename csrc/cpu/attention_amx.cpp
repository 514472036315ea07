#include "cpu/vectors/attention_amx.h"

#include "cpu/vectors/attention_body.h"

namespace effinfer::cpu::amx {
namespace {

using Body = simd::AttentionBody<avx512bf16::KvBf16Pairs, AmxProducts<NativeTiles>>;

// Of bf16 pages, which the variant makes sure of.
void attention_tile(DType, const AttentionTile& tile) {
  Body::run_tile(tile);
}

}  // namespace

const AttentionKernels kAttention = {attention_tile, Body::run_merge};

}  // namespace effinfer::cpu::amx
