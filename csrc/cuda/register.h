// How the CUDA kernels come into the tables of ops/registry.h.
#pragma once

#include "ops/registry.h"

namespace effinfer::cuda {

inline constexpr int32_t kLeastArch = 80;  // bfloat16 products, asynchronous copies
inline constexpr int32_t kWgmmaArch = 90;  // and no other one

// Adds "<op>.cuda".
template <class Problem>
void add(const char* op, const char* (*rejects)(const Problem&),
         void (*launch)(const Problem&, Queue&), size_t (*shared_bytes)(const Problem&) = nullptr) {
  ops::mutable_table<Problem>().add({std::string(op) + ".cuda", Isa::portable, rejects, nullptr,
                                     nullptr, DeviceKind::cuda, launch, kLeastArch, shared_bytes});
}

template <class Problem>
const char* takes_all(const Problem&) {
  return nullptr;
}

// Blocks for `count` things of which each block takes `a_block`.
inline constexpr int64_t blocks_for(int64_t count, int64_t a_block) {
  return (count + a_block - 1) / a_block;
}

// A file each.
void register_elementwise();
void register_rows();
void register_embedding();
void register_operand();
void register_rope();
void register_matmul();
void register_attention();
void register_plain_attention();
void register_latent_attention();
void register_key_scores();
void register_move_tokens();
void register_append_pages();
void register_top_rows();
void register_sample();
void register_row_top();
void register_top_windows();
void register_prefill_index();
void register_column_index();
void register_page_index();
void register_strided_index();
void register_hash_index();
void register_bucket_index();
void register_history_index();
void register_caller_index();

// All of them.
void register_cuda();

}  // namespace effinfer::cuda
