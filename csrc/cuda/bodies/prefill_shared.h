// The shared memory of a block of prefill_tile.h.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/prefill_result.h"
#include "cuda/bodies/prefill_ring.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

template <DType kType, int kColumns, int kWarps, int kDepth, int kHeld>
struct PrefillShared {
  typename PrefillRing<kType, kColumns, kWarps, kDepth>::Shared ring;
  Quad queries[kWarps][2 * kColumns][kWarp];
  typename PrefillResult<kColumns, kWarps, kHeld>::Shared result;
  ItemUnits units;
  Visibility visible;
  TileRow rows[kWarps * kTileRows];
  int32_t is_last;
};

}  // namespace effinfer::cuda
