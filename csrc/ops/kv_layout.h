// One layer's slice of the engine's paged KV cache, in the tile order of the attention kernels.
//
// A page holds kPageSize tokens of every KV head. P = 4 / sizeof(element) elements share a dword
// (f32: 1, f16 and bf16: 2, i8: 4), so that for one head of dimension D (a multiple of 4; 16 for V
// lines to be whole) a page stores
//
//   K   [64 / 16 token groups][D / P][16 tokens][P dims]   a 64-byte line = 16 tokens x P dims: one
//       step of q.k for 16 tokens against a broadcast of P query values
//   V   [64 / P token groups][D / 16][16 dims][P tokens]   a line = 16 dims x P tokens: one step of
//       p.v for 16 dims against a broadcast of P probabilities
//
// f16/bf16 pages are the B operands of AMX-BF16 and VDPBF16PS as they lie. i8 pages have a float
// scale for each (token, head): k_scale / v_scale [page][head][64]; value = scale * q.
#pragma once

#include <cstddef>
#include <cstdint>

#include "effinfer/dtype.h"
#include "ops/coded_pages.h"

namespace effinfer::ops {

inline constexpr int64_t kPageSize = 64;

// Keys that have bounds together: a page, or neighbours within it.
constexpr bool is_bounds_unit(int64_t unit) {
  return unit == 16 || unit == 32 || unit == kPageSize;
}
// That are chosen by means.
constexpr bool is_means_unit(int64_t unit) {
  return unit == 16 || unit == kPageSize;
}

// What the keys of full pages are bounded by (Quest, Tang et al., arXiv:2406.10774, section 3.3):
// for each page, head and unit of 16, 32 or 64 keys the least and the greatest key in each
// dimension, rounded outwards to bf16; for an index that asks for means, their mean; or, for one
// that hashes keys, so many bits of each (ops/hash_index.h). A kernel that needs them of a page
// finds them and says that they are known; whoever changes a page's keys makes them unknown.
//
//   values   [page][head][64 / unit][2][head_dim]    the least, the greatest; or
//            [page][head][64 / unit][head_dim]       the mean; or
//            [page][head][code_bits] words           of a bit of each key
//   known    [page][layer][head]                     0: no; else as the kernels of the device say
struct PageBounds {
  uint16_t* values = nullptr;  // null: none are kept
  int32_t* known = nullptr;    // of this layer in page 0
  int64_t known_stride = 0;    // between pages
  int64_t unit = kPageSize;
  int64_t vectors = 2;    // of a unit; 1: its mean
  int64_t code_bits = 0;  // of a key, in place of vectors

  constexpr int64_t page_numbers(int64_t head_dim) const {
    return code_bits > 0 ? kPageSize * code_bits / 16 : kPageSize / unit * vectors * head_dim;
  }
  constexpr uint16_t* of(int64_t page, int64_t head, int64_t num_heads, int64_t head_dim) const {
    return values + (page * num_heads + head) * page_numbers(head_dim);
  }
};

struct KvLayer {
  DType dtype = DType::bf16;  // f32, f16, bf16 or i8
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t num_pages = 0;
  uint8_t* k = nullptr;  // page p, head h at k + (p * num_kv_heads + h) * head_bytes()
  uint8_t* v = nullptr;
  float* k_scale = nullptr;  // i8 only
  float* v_scale = nullptr;
  CodedPages coded = {};  // beside pages of bf16 or f32
  PageBounds bounds = {};

  size_t head_bytes() const {
    return static_cast<size_t>(kPageSize) * static_cast<size_t>(head_dim) *
           static_cast<size_t>(dtype_info(dtype).block_bytes);
  }
  uint8_t* k_head(int64_t page, int64_t head) const {
    return k + static_cast<size_t>(page * num_kv_heads + head) * head_bytes();
  }
  uint8_t* v_head(int64_t page, int64_t head) const {
    return v + static_cast<size_t>(page * num_kv_heads + head) * head_bytes();
  }
};

// Element offsets within a head's page.
inline constexpr int64_t k_offset(int64_t token, int64_t dim, int64_t head_dim, int64_t p) {
  return ((token / 16 * (head_dim / p) + dim / p) * 16 + token % 16) * p + dim % p;
}
inline constexpr int64_t v_offset(int64_t token, int64_t dim, int64_t head_dim, int64_t p) {
  return ((token / p * (head_dim / 16) + dim / 16) * 16 + dim % 16) * p + token % p;
}

// The sequences of a step and where their KV lies: the CSR vocabulary of the attention operators.
// T query rows are flat; sequence s owns rows [qo_indptr[s], qo_indptr[s+1]), which are its last
// tokens: row i of sequence s sits at position kv_len[s] - (qo_indptr[s+1] - i).
struct BatchLayout {
  int64_t num_tokens = 0;               // T
  int64_t num_sequences = 0;            // S
  const int32_t* qo_indptr = nullptr;   // [S + 1]
  const int32_t* kv_indptr = nullptr;   // [S + 1] into kv_indices
  const int32_t* kv_indices = nullptr;  // page ids
  const int32_t* kv_len = nullptr;      // [S] tokens in the cache, this step's included
  const int32_t* positions = nullptr;   // [T] RoPE positions; the place in the cache is kv_len's
  // [T] or null. A row whose word is 0 sees all up to itself, as do all of its sequence. Others are
  // of a tree of drafts: of the tokens from tree_begin() on (64 at most) a row sees those whose bit
  // is set, its ancestors and itself.
  const uint64_t* ancestors = nullptr;
  const int32_t* tree_start = nullptr;  // [S] or null: trees begin with the step
  const uint8_t* dense = nullptr;       // [S] or null; not 0: its rows visit all keys
  const uint8_t* unchunked = nullptr;   // [S] or null; not 0: its keys are in no chunks

  // Place of the sequence's first token of this step.
  constexpr int32_t step_begin(int64_t sequence) const {
    return kv_len[sequence] - (qo_indptr[sequence + 1] - qo_indptr[sequence]);
  }
  constexpr bool is_tree(int64_t sequence) const {
    const int32_t first = qo_indptr[sequence];
    return ancestors != nullptr && qo_indptr[sequence + 1] > first && ancestors[first] != 0;
  }
  constexpr bool is_dense(int64_t sequence) const {
    return dense != nullptr && dense[sequence] != 0;
  }
  constexpr bool is_unchunked(int64_t sequence) const {
    return unchunked != nullptr && unchunked[sequence] != 0;
  }
  // Of a tree: the token that the first bit of its words stands for.
  constexpr int32_t tree_begin(int64_t sequence) const {
    return tree_start != nullptr ? tree_start[sequence] : step_begin(sequence);
  }
};

}  // namespace effinfer::ops
