// The paged KV cache: a pool of 64-token pages shared by all sequences, one page table a sequence,
// and a radix tree over token ids that lets sequences share the pages of a common prefix.
//
// A token passes through two states: append() makes room for it, commit() says that its K and V
// have been written in every layer. Only committed tokens are forked or cached for reuse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "effinfer/device.h"
#include "effinfer/dtype.h"
#include "effinfer/export.h"

namespace effinfer {

struct KvCacheConfig {
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  DType dtype = DType::bf16;  // f32, f16, bf16 or i8
  int32_t num_pages = 0;
  Device device = {};  // whose memory holds the pages
};

using SequenceId = int64_t;

class EFFINFER_API KvCache {
 public:
  static constexpr int32_t kPageSize = 64;
  // Pages that hold so many tokens.
  static constexpr size_t pages_for(size_t tokens) { return (tokens + kPageSize - 1) / kPageSize; }

  // Allocates the pool (zeroed lazily by the system). Throws OutOfMemory, InvalidArgument.
  explicit KvCache(const KvCacheConfig& config);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const KvCacheConfig& config() const;
  size_t num_bytes() const;
  int32_t free_pages() const;       // free now, without evicting cached prefixes
  int32_t available_pages() const;  // free + cached prefixes that no sequence uses

  // A sequence whose prompt is `tokens`. It starts with the whole pages of the longest cached
  // prefix, shared and committed; `cached` (may be null) receives how many tokens that is, always
  // fewer than tokens.size() so that there is one to compute. The caller appends the others.
  SequenceId create(std::span<const int32_t> tokens, int32_t* cached = nullptr);
  // Makes room for more tokens; a shared last page is copied first (copy on write). Takes pages
  // from unused cached prefixes when none are free. Throws OutOfMemory and changes nothing when
  // there are not enough.
  void append(SequenceId sequence, std::span<const int32_t> tokens);
  bool can_append(SequenceId sequence, int64_t count) const;
  // Takes memory for a sequence's ids of tokens and pages now, so that it takes none while it grows
  // to `tokens`. Pages of the pool are not taken.
  void reserve(SequenceId sequence, int64_t tokens);
  // The next `count` appended tokens now have their K and V in every layer.
  void commit(SequenceId sequence, int64_t count);
  // Of the tokens that are appended and not committed keeps those with these indices, counted from
  // the first of them and strictly increasing: an accepted path of a tree of drafts. Closes up
  // their K and V in every layer, drops the others and commits what is kept. Allocates nothing, and
  // moves nothing that lies where it belongs. Throws InvalidArgument, with nothing changed, for
  // indices out of order or range.
  void keep(SequenceId sequence, std::span<const int32_t> rows);
  // A new sequence that shares all pages. Every token must be committed.
  SequenceId fork(SequenceId sequence);
  // Drops the last `count` tokens.
  void rollback(SequenceId sequence, int64_t count);
  // Caches the whole committed pages for reuse by later sequences; the sequence goes on.
  void publish(SequenceId sequence);
  // Drops the sequence. With `keep_prefix` its whole committed pages stay cached for reuse until
  // they are evicted, least recently used first.
  void release(SequenceId sequence, bool keep_prefix = true);
  // Forgets all cached prefixes.
  void clear_prefixes();

  int64_t length(SequenceId sequence) const;     // tokens appended
  int64_t committed(SequenceId sequence) const;  // of these, tokens whose K and V are written
  std::span<const int32_t> pages(SequenceId sequence) const;
  std::span<const int32_t> tokens(SequenceId sequence) const;
  int32_t cached_prefix_pages() const;  // pages that the radix tree holds

  // Every invariant: reference counts, page ownership, lengths, the radix tree. Throws
  // InternalError.
  void check_integrity() const;

 private:
  friend struct KvCacheAccess;  // kernels read pages through it
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace effinfer
