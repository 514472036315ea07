// The paged KV cache: a pool of 64-token pages shared by all sequences, one page table a sequence,
// and a radix tree over token ids that lets sequences share the pages of a common prefix.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "effinfer/dtype.h"
#include "effinfer/export.h"

namespace effinfer {

namespace kernels {
struct KvLayer;
}

struct KvCacheConfig {
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  DType dtype = DType::bf16;  // f32, f16, bf16 or i8
  int32_t num_pages = 0;
};

using SequenceId = int64_t;

class EFFINFER_API KvCache {
 public:
  static constexpr int32_t kPageSize = 64;

  // Allocates the pool (zeroed lazily by the system). Throws OutOfMemory, InvalidArgument.
  explicit KvCache(const KvCacheConfig& config);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const KvCacheConfig& config() const;
  size_t num_bytes() const;
  int32_t free_pages() const;       // free now, without evicting cached prefixes
  int32_t available_pages() const;  // free + cached prefixes that no sequence uses

  // A sequence that begins with `tokens`; whole pages of a cached prefix are shared. Returns the
  // id; `cached` receives how many leading tokens are already in the cache (always <
  // tokens.size()).
  SequenceId create(std::span<const int32_t> tokens, int32_t* cached);
  // Makes room for `count` more tokens; a shared last page is copied first (copy on write). Takes
  // pages from unused cached prefixes when none are free. Throws OutOfMemory and changes nothing
  // when there are not enough.
  void append(SequenceId sequence, std::span<const int32_t> tokens);
  bool can_append(SequenceId sequence, int64_t count) const;
  // A new sequence that shares all pages.
  SequenceId fork(SequenceId sequence);
  // Drops the last `count` tokens.
  void rollback(SequenceId sequence, int64_t count);
  // Drops the sequence. With `keep_prefix` its whole pages stay cached for reuse until evicted.
  void release(SequenceId sequence, bool keep_prefix = true);
  // Forgets all cached prefixes.
  void clear_prefixes();

  int64_t length(SequenceId sequence) const;
  std::span<const int32_t> pages(SequenceId sequence) const;
  std::span<const int32_t> tokens(SequenceId sequence) const;

  // Every invariant: reference counts, page ownership, lengths, the radix tree. Throws
  // InternalError.
  void check_integrity() const;

  kernels::KvLayer layer(int32_t index) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace effinfer
