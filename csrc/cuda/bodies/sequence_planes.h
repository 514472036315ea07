// Planes of the sequences of a step, in memory that the host sees, too (ops::SequencePlanes).
#pragma once

#include <cstdint>

#include "cuda/unit.h"
#include "ops/page_index.h"

namespace effinfer::cuda {

// The numbers of a KV head; null: the sequence has no such plane.
EFFINFER_DEVICE float* plane_of(const ops::SequencePlanes& planes, int64_t sequence,
                                int32_t kv_head) {
  for (int32_t i = 0; i < planes.num_rows; ++i) {
    const ops::MassRows& rows = planes.rows[i];
    if (rows.sequence != sequence) continue;
    return rows.plane + (planes.first_head + kv_head) * rows.plane_stride;
  }
  return nullptr;
}

}  // namespace effinfer::cuda
