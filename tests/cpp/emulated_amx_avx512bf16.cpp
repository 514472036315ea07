#include "cpu/vectors/attention_amx.h"
#include "cpu/vectors/attention_body.h"
#include "cpu/vectors/key_pages.h"
#include "cpu/vectors/key_rows.h"
#include "cpu/vectors/kv_pack_avx512.h"
#include "cpu/vectors/matmul_amx.h"
#include "emulated_amx.h"
#include "emulated_tiles.h"

namespace emulated {

using namespace effinfer::cpu;
using namespace effinfer::cpu::EFFINFER_LEVEL;

namespace {

using Kv = avx512bf16::KvBf16Pairs;
using Products = AmxProducts<EmulatedTiles>;

template <class Keys, class TileProducts>
using PackedRows = KeyRows<Keys, avx512::KvPack, TileProducts>;

}  // namespace

const AttentionKernels kAttention = {AttentionBody<Kv, Products, KeyPages>::run,
                                     AttentionBody<Kv, Products, PackedRows>::run,
                                     fold_attention<Kv>, end_kept<Kv>, add_kept<Kv>};

void matmul_bf16(const effinfer::ops::MatmulProblem& problem, effinfer::Team& team) {
  AmxMatmul<EmulatedTiles>::run(problem, team);
}

void dpbf16ps(float* c, const uint16_t* a, const uint16_t* b, int rows) {
  TileConfig config;
  for (int tile = 0; tile < 3; ++tile) {
    config.row_bytes[tile] = kTileRowBytes;
    config.rows[tile] = tile == 2 ? kTileRows : static_cast<uint8_t>(rows);
  }
  EmulatedTiles tiles;
  tiles.configure(config);
  tiles.load<0>(c, kTileRowBytes);
  tiles.load<1>(a, kTileRowBytes);
  tiles.load<2>(b, kTileRowBytes);
  tiles.dpbf16ps<0, 1, 2>();
  tiles.store<0>(c, kTileRowBytes);
}

}  // namespace emulated
