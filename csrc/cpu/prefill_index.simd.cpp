#include "cpu/prefill_index.h"

#include "cpu/level.h"
#include "cpu/vectors/block_index_body.h"
#include "cpu/vectors/column_index_body.h"
#include "cpu/vectors/kv.h"

namespace effinfer::cpu {

template <>
const PrefillIndexKernels& kernels<Level::EFFINFER_LEVEL>() {
  using namespace EFFINFER_LEVEL;
  static constexpr PrefillIndexKernels kTable = {column_tile<KvF32, KvF16, KvBf16, KvI8>,
                                                 block_tile<KvF32, KvF16, KvBf16, KvI8>};
  return kTable;
}

}  // namespace effinfer::cpu
