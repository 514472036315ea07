// What a kernel call cannot do without: the numerators of the rates in a profile.
#pragma once

#include <cstdint>

namespace effinfer::ops {

// `bytes` counts each input and output once, as if caches were perfect within the call and empty
// before it. `ops` counts the arithmetic of the inner loops (a multiply-add is two); element-wise
// kernels count the few operations that a value needs, a transcendental function as one.
struct Cost {
  int64_t bytes = 0;
  int64_t ops = 0;
};

}  // namespace effinfer::ops
