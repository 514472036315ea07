// Element types: plain numbers, the block-quantised types of GGUF files, and three compiler-only
// types (`act`, `kv`, `visits`) whose bytes are private to the executable.
#pragma once

#include <cstdint>
#include <string_view>

#include "effinfer/export.h"

namespace effinfer {

enum class DType : uint8_t {
  f32,
  f16,
  bf16,
  i8,
  u8,
  i32,
  i64,
  // GGUF block types, decoded by io/dequantize.h.
  q8_0,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  tq1_0,
  tq2_0,
  // bitnet.cpp's ternary type: one float32 scale for the whole tensor, behind its blocks.
  i2_s,
  // One-byte floats of the OCP 8-bit Floating Point Specification 1.0; e4m3 has no infinities
  // (torch's float8_e4m3fn). No weight types: after them, whose numbers caches on disk hold.
  f8_e4m3,
  f8_e5m2,
  // A matmul operand in the arithmetic that the executable chose (ops/operand.h).
  act,
  // A handle on a layer's KV cache: orders appends before reads, holds no bytes.
  kv,
  // A handle on which keys a layer's blocks of query rows visit in prefill (ops/visits.h).
  visits,
};

inline constexpr int kNumDTypes = static_cast<int>(DType::visits) + 1;

struct DTypeInfo {
  std::string_view name;  // as printed in a graph's text form
  int32_t block_size;     // elements in one block: 1 for plain numbers
  int32_t block_bytes;    // bytes of one block; 0 for compiler-only types
  bool quantized;
  int32_t tail_bytes = 0;  // behind the last block of a tensor that is not empty
};

// Constant-time lookup; never fails for a valid enumerator.
EFFINFER_API const DTypeInfo& dtype_info(DType dtype);

// The dtype of that name; throws InvalidArgument for an unknown one, listing the known names.
EFFINFER_API DType parse_dtype(std::string_view name);

inline std::string_view name(DType dtype) {
  return dtype_info(dtype).name;
}

}  // namespace effinfer
