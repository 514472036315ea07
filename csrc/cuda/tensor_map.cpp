// Tensor maps as the driver encodes them. It is asked for the function, as a build needs no driver.
#include "cuda/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "cuda/stream.h"
#include "effinfer/error.h"

namespace effinfer::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  constexpr unsigned kSince = 12000;  // CUDA's version
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince,
                                         cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess) {
    throw DeviceError("[cuda] the driver has no cuTensorMapEncodeTiled: expected one for CUDA 12");
  }
  return reinterpret_cast<Encode>(function);
}

CUtensorMapSwizzle swizzle_of(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::bytes128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    case Swizzle::bytes64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case Swizzle::bytes32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    default:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

}  // namespace

TensorMap tensor_map(const TileSource& source, Queue& queue) {
  static const Encode encode = find_encode();
  const CurrentDevice current(queue.device());
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(source.cols),
                              static_cast<cuuint64_t>(source.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(source.row_bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(source.box_cols),
                            static_cast<cuuint32_t>(source.box_rows)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(source.data), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(source.swizzle),
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw DeviceError("[cuda] cuTensorMapEncodeTiled: error " +
                      std::to_string(static_cast<int>(status)));
  }
  TensorMap out;
  static_assert(sizeof out == sizeof map);
  std::memcpy(&out, &map, sizeof out);
  return out;
}

}  // namespace effinfer::cuda
