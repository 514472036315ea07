// The tensor types of GGUF files: ggml's numbers, names and block sizes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "effinfer/dtype.h"

namespace effinfer::gguf {

struct TensorType {
  uint32_t id;
  std::string_view name;
  uint32_t block_size;         // elements
  uint32_t block_bytes;        // bytes of a block
  std::optional<DType> dtype;  // empty: effinfer knows the size but does not decode it
  uint32_t tail_bytes = 0;     // behind the last block of a tensor that is not empty
};

// Null for a number that is not in the table.
const TensorType* find_tensor_type(uint32_t id);
// Null for a dtype that files do not have.
const TensorType* find_tensor_type(DType dtype);

}  // namespace effinfer::gguf
