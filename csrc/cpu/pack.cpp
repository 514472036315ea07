// Packing: a file's blocks into the line layout of ops/packed_weight.h, group by group.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "core/memory.h"
#include "cpu/pack_ternary.h"
#include "cpu/packed_lines.h"
#include "effinfer/device.h"
#include "effinfer/error.h"
#include "io/gguf_blocks.h"
#include "ops/packed_weight.h"

namespace effinfer::ops {
namespace {

void store_half(uint8_t* out, uint16_t bits) {
  std::memcpy(out, &bits, sizeof(bits));
}

// Groups of types with one scale a block of 32.
template <class Block>
void pack_direct(const Block* blocks, int64_t row_blocks, int64_t rows, uint8_t* out) {
  const PackedFormat format = packed_format(Block::kDType);
  uint8_t quants[kGroupRows * kSuperblock];
  for (int64_t first = 0; first < row_blocks; first += 2) {
    std::memset(quants, Block::kZero, sizeof(quants));
    uint8_t* scales = out + quant_bytes(format.bits);
    uint8_t* mins = out + min_offset(format);
    std::memset(scales, 0,
                static_cast<size_t>(superblock_bytes(format)) -
                    static_cast<size_t>(quant_bytes(format.bits)));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t b = 0; b < std::min<int64_t>(2, row_blocks - first); ++b) {
        const Block& block = blocks[r * row_blocks + first + b];
        block.quants(quants + r * kSuperblock + b * 32);
        store_half(scales + (b * kGroupRows + r) * 2, block.d.bits());
        if constexpr (Block::kHasMin) {
          store_half(mins + (b * kGroupRows + r) * 2, block.m.bits());
        }
      }
    }
    cpu::with_quant_bits(format.bits, [&]<QuantBits bits>(std::integral_constant<QuantBits, bits>) {
      cpu::pack_lines<bits>(quants, kSuperblock, out);
    });
    out += superblock_bytes(format);
  }
}

// Groups of types with sub-blocks under a scale of 256 elements.
template <class Block>
void pack_super(const Block* blocks, int64_t row_blocks, int64_t rows, uint8_t* out) {
  const PackedFormat format = packed_format(Block::kDType);
  const int64_t cols = row_blocks * Block::kSize;
  const int64_t subs = kSuperblock / format.sub_block;
  uint8_t* header = out;
  std::memset(header, 0, static_cast<size_t>(header_bytes(format, cols)));
  out += header_bytes(format, cols);
  uint8_t quants[kGroupRows * Block::kSize];
  for (int64_t index = 0; index < row_blocks; ++index) {
    std::memset(quants, Block::kZero, sizeof(quants));
    std::memset(out, 0, static_cast<size_t>(4 * superblock_bytes(format)));
    for (int64_t r = 0; r < rows; ++r) {
      const Block& block = blocks[r * row_blocks + index];
      block.quants(quants + r * Block::kSize);
      store_half(header + (index * kGroupRows + r) * 2, block.d.bits());
      if constexpr (Block::kHasMin) {
        store_half(header + header_row_bytes(cols) + (index * kGroupRows + r) * 2,
                   block.dmin.bits());
      }
      for (int64_t j = 0; j < 4 * subs; ++j) {
        const int sub = static_cast<int>(j * format.sub_block / Block::kSubBlock);
        uint8_t* superblock = out + j / subs * superblock_bytes(format);
        superblock[quant_bytes(format.bits) + j % subs * kGroupRows + r] =
            static_cast<uint8_t>(block.sub_scale(sub));
        if constexpr (Block::kHasMin) {
          superblock[min_offset(format) + j % subs * kGroupRows + r] =
              static_cast<uint8_t>(block.sub_min(sub));
        }
      }
    }
    for (int64_t s = 0; s < 4; ++s) {
      cpu::with_quant_bits(format.bits,
                           [&]<QuantBits bits>(std::integral_constant<QuantBits, bits>) {
                             cpu::pack_lines<bits>(quants + s * kSuperblock, Block::kSize, out);
                           });
      out += superblock_bytes(format);
    }
  }
}

// Lines of whole numbers: `pair` consecutive k of a row lie together (2 for bf16, else 1).
template <class Word>
void pack_dense(const uint8_t* data, int64_t cols, int64_t rows, int64_t pair, uint8_t* out) {
  const int64_t padded = (cols + kSuperblock - 1) / kSuperblock * kSuperblock;
  const size_t line_words = static_cast<size_t>(padded * kGroupRows);
  std::memset(out, 0, line_words * sizeof(Word));
  constexpr int64_t kTile = 64;  // of k: 16 rows of it stay in L1 while it is transposed
  for (int64_t k0 = 0; k0 < cols; k0 += kTile) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = k0; k < std::min(k0 + kTile, cols); ++k) {
        Word word;
        std::memcpy(&word, data + (r * cols + k) * static_cast<int64_t>(sizeof(Word)),
                    sizeof(Word));
        const int64_t index = (k / pair * kGroupRows + r) * pair + k % pair;
        std::memcpy(out + index * static_cast<int64_t>(sizeof(Word)), &word, sizeof(Word));
      }
    }
  }
}

// One group of up to 16 rows, the first of which starts at `data`.
void pack_group(const TensorView& weight, const uint8_t* data, int64_t rows, uint8_t* out) {
  const int64_t cols = weight.dims[1];
  switch (weight.dtype) {
    case DType::f32:
      return pack_dense<uint32_t>(data, cols, rows, 1, out);
    case DType::f16:
      return pack_dense<uint16_t>(data, cols, rows, 1, out);
    case DType::bf16:
      return pack_dense<uint16_t>(data, cols, rows, 2, out);
    default:
      break;
  }
  gguf::with_block_type(weight.dtype, [&]<class Block>(std::type_identity<Block>) {
    const auto* blocks = reinterpret_cast<const Block*>(data);
    if constexpr (gguf::kHasSubBlocks<Block>) {
      pack_super(blocks, cols / Block::kSize, rows, out);
    } else {
      pack_direct(blocks, cols / Block::kSize, rows, out);
    }
  });
}

// A slice of the source keeps all threads busy and is small next to any model.
constexpr int64_t kSliceBytes = int64_t{8} << 20;

}  // namespace

PackedWeight packed_shape(const TensorView& weight, TernaryForm form) {
  const PackedFormat format = packed_format(weight.dtype, form);
  if (weight.dims.rank() != 2 || weight.dims[0] < 1 || weight.dims[1] < 1) {
    throw InvalidArgument("[pack] weight: expected a shape [rows, cols], got " +
                          weight.dims.to_string());
  }
  const size_t source_bytes = weight.num_bytes();
  // Padding and widening multiply the size by less than 1024, even for a single value.
  if (source_bytes > static_cast<size_t>(std::numeric_limits<int64_t>::max() / 1024)) {
    throw OutOfMemory("[pack] no memory to pack a weight of " + std::to_string(source_bytes) +
                      " bytes");
  }
  PackedWeight shape;
  shape.format = format;
  shape.source = weight.dtype;
  shape.rows = weight.dims[0];
  shape.cols = weight.dims[1];
  shape.group_bytes = packed_group_bytes(format, shape.cols);
  return shape;
}

void pack_into(const TensorView& weight, ThreadPool& pool, uint8_t* out, const SourceDone& done,
               TernaryForm form) {
  const PackedWeight shape = packed_shape(weight, form);
  const DTypeInfo& info = dtype_info(weight.dtype);
  const int64_t row_bytes = shape.cols / info.block_size * info.block_bytes;
  const int64_t groups = shape.groups();
  const int64_t slice = std::max<int64_t>(1, kSliceBytes / (kGroupRows * row_bytes));
  const auto* data = static_cast<const uint8_t*>(weight.data);
  std::atomic<bool> has_other_code = false;
  const auto pack_one = [&](int64_t group) {
    const int64_t first = group * kGroupRows;
    const int64_t rows = std::min(kGroupRows, shape.rows - first);
    uint8_t* to = out + group * shape.group_bytes;
    if (!is_ternary(shape.format)) {
      pack_group(weight, data + first * row_bytes, rows, to);
    } else if (!cpu::pack_ternary_group(weight, first, rows, shape.format, to)) {
      has_other_code = true;
    }
  };
  const auto check = [&] {
    if (!has_other_code) return;
    throw InvalidArgument("[pack] weight: expected codes 0, 1 and 2 in " +
                          std::string(name(weight.dtype)) + ", got 3");
  };
  const auto report = [&](int64_t begin, int64_t end) {
    if (!done || begin >= end) return;
    const int64_t last_row = std::min(end * kGroupRows, shape.rows);
    done(static_cast<size_t>(begin * kGroupRows * row_bytes),
         static_cast<size_t>(last_row * row_bytes));
  };
  if (memory_features().numa_nodes > 1) {
    pool.parallel([&](Team& team) {
      const int64_t begin = groups * team.rank() / team.size();
      const int64_t end = groups * (team.rank() + 1) / team.size();
      const int64_t step = std::max<int64_t>(1, slice / team.size());
      for (int64_t first = begin; first < end; first += step) {
        const int64_t last = std::min(first + step, end);
        for (int64_t group = first; group < last; ++group) pack_one(group);
        report(first, last);
      }
    });
    return check();
  }
  for (int64_t first = 0; first < groups; first += slice) {
    const int64_t count = std::min(slice, groups - first);
    pool.parallel([&](Team& team) {
      team.for_chunks(count, [&](int64_t chunk) { pack_one(first + chunk); });
    });
    report(first, first + count);
  }
  check();
}

PackedBuffer pack(const TensorView& weight, ThreadPool& pool, TernaryForm form) {
  PackedBuffer result;
  result.view = packed_shape(weight, form);
  const size_t bytes = result.view.num_bytes();
  result.storage = memory_of({}).allocate(bytes, Pages::huge);
  if (!result.storage) {
    throw OutOfMemory("[pack] no memory for a packed weight of " + std::to_string(bytes) +
                      " bytes");
  }
  auto* packed = static_cast<uint8_t*>(result.storage.get());
  pack_into(weight, pool, packed, nullptr, form);
  result.view.data = packed;
  return result;
}

}  // namespace effinfer::ops
