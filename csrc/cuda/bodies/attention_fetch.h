// How blocks of keys and values come into shared memory: 16 bytes a lane to the place where some
// lane of the warp reads them (bodies/fragments.h). Parts that lie one behind the other are a run,
// whose address is looked up once. Keys of a displaced row are gathered instead, token by token.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/fragments.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// The columns of a block of keys, or both halves of a page's values of 32 dims: what a lane copies
// of the next one.
struct PartRun {
  static constexpr int kGathered = -1;  // as load_step, where nothing is copied

  const uint8_t* from = nullptr;  // null: nothing
  int32_t load_step = 0;          // bytes from one load to the next
  int32_t place = 0;              // among the warp's
};

template <DType kType>
struct Fetch {
  using Block = KvBlock<kType>;
  static constexpr int P = Block::P;
  using Slot = Quad[Block::kLoads][kWarp];
  // Of the 8 tokens of a lane's scores: scales of keys, then of values.
  using Scales = Quad[4][kWarp];

  const uint8_t* keys;  // of the KV head, page 0
  const uint8_t* values;
  int64_t key_stride;  // bytes between pages
  int64_t value_stride;
  int32_t first_far;  // ops::KvRows
  int64_t key_far;
  int64_t value_far;
  const float* key_scales = nullptr;
  const float* value_scales = nullptr;
  int64_t key_scale_stride = 0;
  int64_t value_scale_stride = 0;
  const int32_t* pages;  // of the sequence
  int32_t tree_start;

  EFFINFER_DEVICE static Fetch of(const ops::AttentionProblem& p, const ops::AttentionTile& tile) {
    Fetch f;
    f.keys = p.k.data + tile.kv_head * p.k.head_stride;
    f.values = p.v.data + tile.kv_head * p.v.head_stride;
    f.key_stride = p.k.page_stride;
    f.value_stride = p.v.page_stride;
    f.first_far = p.k.first_far;
    f.key_far = p.k.far;
    f.value_far = p.v.far;
    if constexpr (Block::kScaled) {
      f.key_scales = p.k.scales + tile.kv_head * p.k.scale_head_stride;
      f.value_scales = p.v.scales + tile.kv_head * p.v.scale_head_stride;
      f.key_scale_stride = p.k.scale_page_stride;
      f.value_scale_stride = p.v.scale_page_stride;
    }
    f.pages = p.batch.kv_indices + p.batch.kv_indptr[tile.sequence];
    f.tree_start = p.batch.is_tree(tile.sequence) ? p.batch.tree_begin(tile.sequence) : INT32_MAX;
    return f;
  }

  // Block `index` of 32 tokens of a pass, of which there are 8, and block `column` of 32 dims.
  EFFINFER_DEVICE static bool is_visited(const ChunkPass& pass, int index) {
    return (pass.units >> index / 2 & 1) != 0;
  }

  // Half `half` of a page, from its first column on; of a head of `dims`.
  template <class Unit>
  EFFINFER_DEVICE PartRun keys_of(Unit& unit, int32_t page, int half, int dims) const {
    const int owner = Block::key_owner(unit.lane);
    const int token = half * kBlock + 4 * Block::quad(owner);
    const int offset = Block::key_offset(token, Block::key_line(owner, 0), dims);
    return {key_page(page) + offset, Block::kKeyLines * 64, Block::place(owner)};
  }
  template <class Unit>
  EFFINFER_DEVICE PartRun values_of(Unit& unit, int32_t page, int column, int dims) const {
    const int owner = Block::value_owner(unit.lane);
    const int dim = first_dim(owner, column, dims);
    const int offset = Block::value_offset(Block::value_group(owner, 0), dim, dims);
    return {value_page(page) + offset, Block::kValueGroups * dims * 4, Block::place(owner)};
  }

  // Whether places of unit `at` of a chunk are other tokens for a displaced row.
  EFFINFER_DEVICE bool is_in_tree(int32_t chunk, int at) const {
    return chunk * kChunkTokens + (at + 1) * kUnitTokens > tree_start;
  }

  // Block `index` of the pass's tokens, of which there are 8, and `column` of 32 dims. Dword by
  // dword, in a loop that takes little room in the kernel: a draft's few blocks are no part of what
  // decides its speed. A dword of values is of P tokens, each in a dword of its own.
  template <class Unit>
  EFFINFER_DEVICE void gather(Unit& unit, const ChunkPass& pass, bool of_values, int index,
                              int column, int dims, Slot& to) const {
    const bool is_half = !of_values && dims - column * kBlock < kBlock;
    const int loads = is_half ? Block::kLoads / 2 : Block::kLoads;
    for (int n = 0; n < 4 * loads; ++n) {
      const int place =
          of_values ? Block::value_group(unit.lane, n / 4) * P : 4 * Block::quad(unit.lane) + n % 4;
      const int line = column * (kBlock / P) + Block::key_line(unit.lane, n / 4);
      const int dim = first_dim(unit.lane, column, dims) + n % 4;
      to[n / 4][Block::place(unit.lane)].words[n % 4] =
          gathered(unit, pass, of_values, index * kBlock + place, of_values ? dim : line, dims);
    }
  }

  // From place `place` of the pass's chunk on: a dword of a line of keys, or of P tokens of a dim
  // of values.
  template <class Unit>
  EFFINFER_DEVICE uint32_t gathered(Unit& unit, const ChunkPass& pass, bool of_values, int place,
                                    int line_or_dim, int dims) const {
    const int tokens = of_values ? P : 1;
    uint32_t numbers = 0;
    EFFINFER_NO_UNROLL
    for (int j = 0; j < tokens; ++j) {
      const Token at = find(unit, pass, place + j);
      const uint8_t* dword = of_values ? value_page(at.page) : key_page(at.page);
      dword += of_values ? Block::value_offset(at.token / P, line_or_dim, dims)
                         : Block::key_offset(at.token, line_or_dim, dims);
      const uint32_t from = unit.load(reinterpret_cast<const uint32_t*>(dword));
      numbers |= of_values ? Block::moved(from, at.token % P, j) : from;
    }
    return numbers;
  }

  template <class Unit>
  EFFINFER_DEVICE void fetch_scales(Unit& unit, const ChunkPass& pass, int index,
                                    Scales& to) const {
    if (!is_visited(pass, index)) return;
    if (pass.path != 0 && is_in_tree(pass.chunk, index / 2)) {
      return gather_scales(unit, pass, index, to);
    }
    const int64_t page = pass.pages[index / 2];
    const int token = index % 2 * kBlock + unit.lane % 4 * 8;
    const float* k = key_scales + page * key_scale_stride + token;
    const float* v = value_scales + page * value_scale_stride + token;
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      unit.copy_async(&to[i][unit.lane], k + 4 * i);
      unit.copy_async(&to[2 + i][unit.lane], v + 4 * i);
    }
  }

  EFFINFER_DEVICE const uint8_t* key_page(int32_t page) const {
    return keys + page * key_stride + (page >= first_far ? key_far : 0);
  }
  EFFINFER_DEVICE const uint8_t* value_page(int32_t page) const {
    return values + page * value_stride + (page >= first_far ? value_far : 0);
  }

  // The second half of a block may lie behind the last dim: then again the first, for nobody.
  EFFINFER_DEVICE static int first_dim(int lane, int column, int dims) {
    const int dim = column * kBlock + 4 * Block::quad(lane);
    return dim < dims ? dim : dim - 16;
  }

  struct Token {
    int32_t page;
    int32_t token;  // in the page
  };
  // Of a place of the pass's chunk.
  template <class Unit>
  EFFINFER_DEVICE Token find(Unit& unit, const ChunkPass& pass, int place) const {
    const int32_t token = token_of_place(pass.chunk * kChunkTokens + place, pass.path, tree_start);
    return {unit.load(pages + token / kUnitTokens), token % kUnitTokens};
  }

  // Of a token of the unit: the unit's scales of keys, then of values.
  template <class Unit>
  EFFINFER_DEVICE void gather_scale(Unit& unit, const ChunkPass& pass, int at, int token,
                                    float* to) const {
    const Token from = find(unit, pass, at * kUnitTokens + token);
    to[token] = unit.load(key_scales + from.page * key_scale_stride + from.token);
    to[kUnitTokens + token] = unit.load(value_scales + from.page * value_scale_stride + from.token);
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE void gather_scales(Unit& unit, const ChunkPass& pass, int index,
                                     Scales& to) const {
    for (int i = 0; i < 8; ++i) {
      const Token at = find(unit, pass, index * kBlock + unit.lane % 4 * 8 + i);
      const float k = unit.load(key_scales + at.page * key_scale_stride + at.token);
      const float v = unit.load(value_scales + at.page * value_scale_stride + at.token);
      to[i / 4][unit.lane].words[i % 4] = bits_of(k);
      to[2 + i / 4][unit.lane].words[i % 4] = bits_of(v);
    }
  }
};

}  // namespace effinfer::cuda
