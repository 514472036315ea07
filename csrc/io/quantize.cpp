// Tensors in slices, shared by the threads: each slice is decoded to float32, encoded, and decoded
// again for its error.
#include "effinfer/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "effinfer/error.h"
#include "effinfer/gguf.h"
#include "io/quantize_blocks.h"
#include "io/quantize_fit.h"

namespace effinfer {
namespace {

constexpr int64_t kSlice = int64_t{1} << 16;  // elements; a multiple of every block size
constexpr int64_t kTernaryBlock = 256;        // of tq1_0 and tq2_0; i2_s is looked at in these too

[[noreturn]] void fail(const std::string& what) {
  throw InvalidArgument("[quantize] " + what);
}

// What the magnitudes of a slice's, and then of a tensor's values are.
struct Magnitudes {
  double sum = 0;
  double squares = 0;
  float largest = 0;
  float smallest = std::numeric_limits<float>::infinity();  // of those that are not 0
  bool ternary_blocks = true;                               // each block of 256 is 0 and +-s

  bool ternary() const { return smallest >= largest; }
  void add(const Magnitudes& other) {
    sum += other.sum;
    squares += other.squares;
    largest = std::max(largest, other.largest);
    smallest = std::min(smallest, other.smallest);
    ternary_blocks = ternary_blocks && other.ternary_blocks;
  }
};

Magnitudes measure(const float* w, int64_t count) {
  Magnitudes all;
  for (int64_t begin = 0; begin < count; begin += kTernaryBlock) {
    Magnitudes block;
    for (int64_t i = begin; i < std::min(begin + kTernaryBlock, count); ++i) {
      const float magnitude = std::abs(w[i]);
      block.sum += magnitude;
      block.squares += double{magnitude} * magnitude;
      block.largest = std::max(block.largest, magnitude);
      if (magnitude > 0) block.smallest = std::min(block.smallest, magnitude);
    }
    block.ternary_blocks = block.ternary();
    all.add(block);
  }
  return all;
}

// Calls body(slice, first element, count) on the pool's threads.
template <class Body>
void for_slices(int64_t elements, ThreadPool& pool, Body&& body) {
  const int64_t slices = (elements + kSlice - 1) / kSlice;
  pool.parallel([&](Team& team) {
    team.for_chunks(slices, [&](int64_t slice) {
      const int64_t first = slice * kSlice;
      body(slice, first, std::min(kSlice, elements - first));
    });
  });
}

void digits_of(const float* w, int64_t count, float scale, uint8_t* digits) {
  const float inv = gguf::inverse(scale);
  for (int64_t i = 0; i < count; ++i) {
    digits[i] = static_cast<uint8_t>(gguf::limit(gguf::nearest(w[i] * inv), -1.0f, 1.0f) + 1.0f);
  }
}

// A scale of 0 stands for each block's own.
template <class Block>
void encode_ternary_slice(const float* w, int64_t count, float scale, uint8_t* out) {
  auto* blocks = reinterpret_cast<Block*>(out);
  for (int64_t i = 0; i < count / Block::kSize; ++i) {
    const float* values = w + i * Block::kSize;
    uint8_t digits[Block::kSize];
    if constexpr (std::is_same_v<Block, gguf::BlockI2S>) {
      digits_of(values, Block::kSize, scale, digits);
      gguf::encode_ternary(digits, blocks[i]);
    } else {
      const float own = scale != 0 ? scale : measure(values, Block::kSize).largest;
      digits_of(values, Block::kSize, own, digits);
      gguf::encode_ternary(digits, own, blocks[i]);
    }
  }
}

template <class Block>
void encode_slice(const float* w, int64_t count, uint8_t* out) {
  auto* blocks = reinterpret_cast<Block*>(out);
  for (int64_t i = 0; i < count / Block::kSize; ++i) {
    gguf::encode_block(w + i * Block::kSize, blocks[i]);
  }
}

template <class Convert>
void narrow(const float* w, int64_t count, Convert convert, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = convert(w[i]);
    std::memcpy(out + 2 * i, &bits, sizeof bits);
  }
}

void encode(const float* w, int64_t count, DType target, float scale, uint8_t* out) {
  switch (target) {
    case DType::f32:
      std::memcpy(out, w, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::f16:
      return narrow(w, count, [](float x) { return f32_to_f16(x); }, out);
    case DType::bf16:
      return narrow(w, count, [](float x) { return f32_to_bf16(x); }, out);
    case DType::q8_0:
      return encode_slice<gguf::BlockQ8_0>(w, count, out);
    case DType::q4_0:
      return encode_slice<gguf::BlockQ4_0>(w, count, out);
    case DType::q4_1:
      return encode_slice<gguf::BlockQ4_1>(w, count, out);
    case DType::q5_0:
      return encode_slice<gguf::BlockQ5_0>(w, count, out);
    case DType::q5_1:
      return encode_slice<gguf::BlockQ5_1>(w, count, out);
    case DType::q4_k:
      return encode_slice<gguf::BlockQ4K>(w, count, out);
    case DType::q5_k:
      return encode_slice<gguf::BlockQ5K>(w, count, out);
    case DType::q6_k:
      return encode_slice<gguf::BlockQ6K>(w, count, out);
    case DType::tq1_0:
      return encode_ternary_slice<gguf::BlockTq1_0>(w, count, scale, out);
    case DType::tq2_0:
      return encode_ternary_slice<gguf::BlockTq2_0>(w, count, scale, out);
    case DType::i2_s:
      return encode_ternary_slice<gguf::BlockI2S>(w, count, scale, out);
    default:
      break;
  }
}

bool is_ternary(DType dtype) {
  return dtype == DType::tq1_0 || dtype == DType::tq2_0 || dtype == DType::i2_s;
}

Magnitudes measure_tensor(const TensorView& source, int64_t elements, ThreadPool& pool) {
  std::vector<Magnitudes> slices(static_cast<size_t>((elements + kSlice - 1) / kSlice));
  for_slices(elements, pool, [&](int64_t slice, int64_t first, int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    dequantize_part(source, first, count, values.data());
    slices[static_cast<size_t>(slice)] = measure(values.data(), count);
  });
  Magnitudes all;
  for (const Magnitudes& slice : slices) all.add(slice);
  return all;
}

// The scale of a ternary tensor; 0: each block has its own.
float ternary_scale(const Magnitudes& all, int64_t elements, DType target) {
  if (all.largest == 0) return target == DType::i2_s ? 1.0f : 0.0f;
  if (all.ternary()) return all.largest;
  if (!all.ternary_blocks) return static_cast<float>(all.sum / static_cast<double>(elements));
  if (target == DType::i2_s) fail("i2_s: expected values of one scale, got a scale a block");
  return 0;
}

}  // namespace

bool can_quantize_to(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::f16:
    case DType::bf16:
    case DType::q8_0:
    case DType::q4_0:
    case DType::q4_1:
    case DType::q5_0:
    case DType::q5_1:
    case DType::q4_k:
    case DType::q5_k:
    case DType::q6_k:
      return true;
    default:
      return is_ternary(dtype);
  }
}

QuantizeError quantize(const TensorView& source, DType target, ThreadPool& pool, void* out) {
  if (!can_quantize_to(target)) {
    fail(
        "dtype: expected f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, tq1_0, "
        "tq2_0 or i2_s, got " +
        std::string(name(target)));
  }
  const TensorView result{out, target, source.dims};
  const DTypeInfo& info = dtype_info(target);
  const size_t bytes = result.num_bytes();
  source.num_bytes();  // rejects rows that are no whole blocks
  const int64_t elements = source.dims.num_elements();
  if (elements == 0) return {};

  const Magnitudes all = measure_tensor(source, elements, pool);
  if (!std::isfinite(all.squares)) fail("values: expected finite numbers, got others");
  const float scale = is_ternary(target) ? ternary_scale(all, elements, target) : 0.0f;
  auto* data = static_cast<uint8_t*>(out);
  if (info.tail_bytes > 0) {
    uint8_t* tail = data + bytes - static_cast<size_t>(info.tail_bytes);
    std::memset(tail, 0, static_cast<size_t>(info.tail_bytes));
    std::memcpy(tail, &scale, sizeof scale);
  }
  std::vector<double> errors(static_cast<size_t>((elements + kSlice - 1) / kSlice));
  for_slices(elements, pool, [&](int64_t slice, int64_t first, int64_t count) {
    std::vector<float> old_values(static_cast<size_t>(count));
    std::vector<float> new_values(static_cast<size_t>(count));
    dequantize_part(source, first, count, old_values.data());
    encode(old_values.data(), count, target, scale,
           data + first / info.block_size * info.block_bytes);
    dequantize_part(result, first, count, new_values.data());
    double error = 0;
    for (size_t i = 0; i < old_values.size(); ++i) {
      const double difference = double{new_values[i]} - double{old_values[i]};
      error += difference * difference;
    }
    errors[static_cast<size_t>(slice)] = error;
  });
  QuantizeError result_error{0, all.squares};
  for (const double error : errors) result_error.squared_error += error;
  if (!std::isfinite(result_error.squared_error)) {
    fail("values: expected numbers in the range of " + std::string(info.name) + ", got " +
         std::to_string(all.largest));
  }
  return result_error;
}

}  // namespace effinfer
