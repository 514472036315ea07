// Whether a problem is the faster for products of bfloat16. Those round more than float32 does, so
// this follows from the CPU and the shape alone, never from a measurement: tiles multiply bfloat16
// many times as fast as vectors do anything; vectors only on some CPUs (CpuFeatures::fast_bf16).
#pragma once

#include "effinfer/device.h"
#include "ops/registry.h"

namespace effinfer::ops {

// Of a problem that asks for bf16; false where no kernel takes it.
template <class Problem>
bool bf16_pays(const Problem& problem, const Target& target,
               const CpuFeatures& features = cpu_features()) {
  const Variant<Problem>* variant = table<Problem>().find(problem, target);
  return variant != nullptr && (variant->isa >= Isa::amx || features.fast_bf16);
}

}  // namespace effinfer::ops
