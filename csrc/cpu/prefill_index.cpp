#include "cpu/prefill_index.h"

#include "cpu/vectors/block_index_body.h"
#include "cpu/vectors/column_index_body.h"
#include "cpu/vectors/kv_portable.h"

namespace effinfer::cpu::portable {

const PrefillIndexKernels kPrefillIndex = {simd::column_tile<KvF32, KvF16, KvBf16, KvI8>,
                                           simd::block_tile<KvF32, KvF16, KvBf16, KvI8>};

}  // namespace effinfer::cpu::portable
