// Blocks to float32. The order of float operations is that of the gguf package (quants.py), so that
// results agree bit for bit; the build turns contraction into fused multiply-adds off.
#include <cstring>

#include "core/float16.h"
#include "effinfer/error.h"
#include "effinfer/gguf.h"
#include "io/gguf_blocks.h"

namespace effinfer {
namespace {

template <class Block>
void decode_block(const Block& block, float* out) {
  uint8_t quants[Block::kSize];
  block.quants(quants);
  const float d = block.d.value();
  if constexpr (!gguf::kHasSubBlocks<Block>) {
    for (int i = 0; i < Block::kSize; ++i) {
      out[i] = d * static_cast<float>(quants[i] - Block::kZero);
    }
    if constexpr (Block::kHasMin) {
      const float m = block.m.value();
      for (int i = 0; i < Block::kSize; ++i) out[i] += m;
    }
  } else {
    for (int sub = 0; sub < Block::kSize / Block::kSubBlock; ++sub) {
      const float scale = d * static_cast<float>(block.sub_scale(sub));
      const uint8_t* q = quants + sub * Block::kSubBlock;
      float* values = out + sub * Block::kSubBlock;
      for (int i = 0; i < Block::kSubBlock; ++i) {
        values[i] = scale * static_cast<float>(q[i] - Block::kZero);
      }
      if constexpr (Block::kHasMin) {
        const float min = block.dmin.value() * static_cast<float>(block.sub_min(sub));
        for (int i = 0; i < Block::kSubBlock; ++i) values[i] -= min;
      }
    }
  }
}

void decode_i2_s(const gguf::BlockI2S* blocks, int64_t count, float d, float* out) {
  constexpr int kSize = gguf::BlockI2S::kSize;
  for (int64_t i = 0; i < count / kSize; ++i) {
    uint8_t quants[kSize];
    blocks[i].quants(quants);
    for (int j = 0; j < kSize; ++j) {
      out[i * kSize + j] = d * static_cast<float>(quants[j] - gguf::BlockI2S::kZero);
    }
  }
}

template <class Convert>
void widen(const uint8_t* bytes, int64_t count, Convert convert, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, sizeof bits);
    out[i] = convert(bits);
  }
}

}  // namespace

void dequantize(DType dtype, const void* blocks, int64_t count, float* out) {
  const DTypeInfo& info = dtype_info(dtype);
  if (count < 0 || count % info.block_size != 0) {
    throw InvalidArgument("[dequantize] count: expected a multiple of " +
                          std::to_string(info.block_size) + " for " + std::string(info.name) +
                          ", got " + std::to_string(count));
  }
  if (count == 0) return;
  const auto* bytes = static_cast<const uint8_t*>(blocks);
  switch (dtype) {
    case DType::f32:
      std::memcpy(out, bytes, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::f16:
      widen(bytes, count, [](uint16_t bits) { return f16_to_f32(bits); }, out);
      return;
    case DType::bf16:
      widen(bytes, count, [](uint16_t bits) { return bf16_to_f32(bits); }, out);
      return;
    case DType::i2_s:
      return decode_i2_s(reinterpret_cast<const gguf::BlockI2S*>(bytes), count,
                         gguf::i2_s_scale(blocks, count), out);
    default:
      break;
  }
  if (!info.quantized) {
    throw InvalidArgument("[dequantize] dtype: expected f32, f16, bf16 or a quantised type, got " +
                          std::string(info.name));
  }
  gguf::with_block_type(dtype, [&]<class Block>(std::type_identity<Block>) {
    const auto* block = reinterpret_cast<const Block*>(bytes);
    for (int64_t i = 0; i < count / Block::kSize; ++i) {
      decode_block(block[i], out + i * Block::kSize);
    }
  });
}

void dequantize_part(const TensorView& tensor, int64_t first, int64_t count, float* out) {
  const DTypeInfo& info = dtype_info(tensor.dtype);
  const int64_t elements = tensor.dims.num_elements();
  if (first < 0 || count < 0 || first > elements - count || first % info.block_size != 0 ||
      count % info.block_size != 0) {
    throw InvalidArgument("[dequantize] part: expected whole blocks of " +
                          std::to_string(info.block_size) + " in " + std::to_string(elements) +
                          " elements, got " + std::to_string(count) + " from " +
                          std::to_string(first));
  }
  if (count == 0) return;
  const uint8_t* bytes =
      static_cast<const uint8_t*>(tensor.data) + first / info.block_size * info.block_bytes;
  if (tensor.dtype != DType::i2_s) return dequantize(tensor.dtype, bytes, count, out);
  decode_i2_s(reinterpret_cast<const gguf::BlockI2S*>(bytes), count,
              gguf::i2_s_scale(tensor.data, elements), out);
}

}  // namespace effinfer
