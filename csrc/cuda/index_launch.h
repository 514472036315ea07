// Which kernel of an index is for a problem's keys (bodies/index_keys.h).
#pragma once

#include "cuda/bodies/tiled_queries.h"
#include "effinfer/dtype.h"
#include "ops/prefill_index.h"

namespace effinfer::cuda {

// Null, or why no kernel reads them.
inline const char* rejects_index_keys(const ops::PrefillIndexInputs& in) {
  const DType dtype = in.kv.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::i8) {
    return "kv_dtype is not f32, f16, bf16 or i8";
  }
  if (in.kv.head_dim <= 0 || in.kv.head_dim % 16 != 0) return "head_dim is not a multiple of 16";
  return nullptr;
}

// visit.operator()<dtype>() for keys that are not rejected.
template <class Visit>
auto with_index_keys(DType dtype, Visit&& visit) {
  if (dtype == DType::f16) return visit.template operator()<DType::f16>();
  if (dtype == DType::i8) return visit.template operator()<DType::i8>();
  return visit.template operator()<DType::bf16>();  // of f32, too
}

// The same of keys that kernels widen to float32, of all types of pages, and of the queries that
// `group` heads multiply them with.
inline const char* rejects_page_keys(const ops::KvLayer& kv, int64_t group) {
  const DType dtype = kv.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::i8) {
    return "kv_dtype is not f32, f16, bf16 or i8";
  }
  if (kv.head_dim <= 0 || kv.head_dim % 16 != 0) return "head_dim is not a multiple of 16";
  if (kv.head_dim > TiledQueries::kMostDims) return "head_dim is above 256";
  if (group > TiledQueries::kMostHeads || group * kv.head_dim > TiledQueries::kMostNumbers) {
    return "heads that share keys are above 128, or these x head_dim above 8192";
  }
  return nullptr;
}

}  // namespace effinfer::cuda
