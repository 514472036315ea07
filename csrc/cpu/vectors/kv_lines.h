// The lines of a page's keys by their dtype, for kernels that read keys of any.
#pragma once

#include "cpu/vectors/kv.h"
#include "effinfer/dtype.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// call<Kv>() for those of a dtype: f32, f16, bf16 or i8.
template <class Call>
void with_lines(DType dtype, Call&& call) {
  switch (dtype) {
    case DType::f32:
      return call.template operator()<KvF32>();
    case DType::f16:
      return call.template operator()<KvF16>();
    case DType::bf16:
      return call.template operator()<KvBf16>();
    default:
      return call.template operator()<KvI8>();
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
