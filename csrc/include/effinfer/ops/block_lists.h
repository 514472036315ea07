// Block maps and trees as the lists and masks that the attention kernel walks.
#pragma once

#include <cstdint>
#include <vector>

#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

// What each (KV head, block of query rows) of one sequence visits.
struct BlockLists {
  std::vector<int32_t> list_indptr;  // [L + 1]: into spans
  std::vector<int32_t> spans;       // [n, 2]: tokens [begin, end), ascending and disjoint in a list
  std::vector<int32_t> lists;       // [L, 4]: sequence (0), KV head, first row, number of rows
  std::vector<int64_t> span_masks;  // [n]: where each span's bits start in the mask; or empty
};

// A block matrix in compressed rows (scipy's BSR): block row i of R rows visits the columns of the
// blocks indices[indptr[i] : indptr[i + 1]], C columns each, in any order, none twice; every KV
// head the same.
struct BlockMatrix {
  TensorView indptr;   // int32 [M / R + 1], from 0, never decreasing
  TensorView indices;  // int32 [indptr[M / R]], in [0, N / C)
  int64_t M = 0;
  int64_t N = 0;
  int64_t R = 0;
  int64_t C = 0;
};

// Adjacent blocks become one span; with `masked` each block is a span of its own, whose bits are
// block_mask's. Throws InvalidArgument.
EFFINFER_API BlockLists block_sparse_lists(const BlockMatrix& matrix, int32_t num_kv_heads,
                                           bool masked);

// Bits of a mask of elements by block, then row, then column: bit (b * R + r) * C + c, the first in
// the lowest bit of a byte. `packed`: FlashInfer's order, u8, by block row, then row, then block,
// then column, each block row from a new byte. Throws InvalidArgument.
EFFINFER_API std::vector<uint8_t> block_mask(const BlockMatrix& matrix, const TensorView& packed);

// Blocks of any sizes, other ones for each KV head. `block_mask_map`: u8 [H, MB, NB], not 0 where
// rows of block i visit columns of block j; `block_row_sz`: int32 [H, MB], `block_col_sz`: int32
// [H, NB], which add up to the same number of rows, and of columns, for every head. Throws
// InvalidArgument.
struct VariableBlockLists : BlockLists {
  int64_t num_rows = 0;
  int64_t num_columns = 0;
};
EFFINFER_API VariableBlockLists variable_block_lists(const TensorView& block_mask_map,
                                                     const TensorView& block_row_sz,
                                                     const TensorView& block_col_sz);

struct PackedMask {
  std::vector<uint8_t> bits;    // of a sequence: bit i * kv_len + j, lowest first, from a new byte
  std::vector<int64_t> indptr;  // [S + 1]: the bytes of each sequence
};

// The rows of a sequence as a tree of drafts behind kv_len - rows tokens (SpecInfer,
// arXiv:2305.09781): a row sees those tokens, its ancestors and itself. `parents`: int32 [T], the
// parent's number within the sequence, less than the row's own, or -1. Throws InvalidArgument.
EFFINFER_API PackedMask ancestor_mask(const TensorView& parents, const TensorView& qo_indptr,
                                      const TensorView& kv_len);

}  // namespace effinfer::ops
