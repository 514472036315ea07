// Levels: portable avx2 avx512 avx512bf16
#include "cpu/prefill_index.h"

#include "cpu/level.h"
#include "cpu/vectors/block_index_body.h"
#include "cpu/vectors/column_index_body.h"
#include "cpu/vectors/kv.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <template <class> class Body, class Tile>
void run(const Tile& tile) {
#if EFFINFER_LEVEL_AVX512BF16
  Body<KvBf16Pairs>::run(tile);  // the variants make sure that keys are bfloat16
#else
  switch (tile.keys.dtype) {
    case DType::f32:
      return Body<KvF32>::run(tile);
    case DType::f16:
      return Body<KvF16>::run(tile);
    case DType::bf16:
      return Body<KvBf16>::run(tile);
    default:
      return Body<KvI8>::run(tile);
  }
#endif
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const PrefillIndexKernels& kernels<Level::EFFINFER_LEVEL>() {
  using namespace EFFINFER_LEVEL;
  static constexpr PrefillIndexKernels kTable = {run<ColumnIndexBody, ColumnTile>,
                                                 run<BlockIndexBody, BlockTile>};
  return kTable;
}

}  // namespace effinfer::cpu
