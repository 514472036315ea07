// The paged KV cache: a pool of 64-token pages shared by all sequences, one page table a sequence,
// and a radix tree over token ids that lets sequences share the pages of a common prefix.
//
// A token passes through two states: append() makes room for it, commit() says that its K and V
// have been written in every layer. Only committed tokens are forked or cached for reuse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "effinfer/device.h"
#include "effinfer/dtype.h"
#include "effinfer/export.h"
#include "effinfer/slot_plane.h"

namespace effinfer {

// Layers with one page table: a page id names the same slots in all of them.
struct KvGroup {
  std::vector<int32_t> layers;  // ascending
  // -1: all keys stay. Else what lies so many tokens before the next one is never read again: its
  // pages are freed as tokens are committed, but for kSlack tokens that may be rolled back.
  int32_t window_left = -1;
  // Of a window: what index_unit says is kept of its pages, too. A cache without it fits as well:
  // the index then makes it in each step.
  bool indexed = false;
  friend bool operator==(const KvGroup& a, const KvGroup& b) {
    return a.layers == b.layers && a.window_left == b.window_left;
  }
};

// How the keys of a layer are rotated: pair d by the position times inv_freq[d].
struct KvRope {
  std::vector<float> inv_freq;  // of the leading 2 * size dimensions; empty: keys are not rotated
  bool interleaved = false;     // pairs (2 d, 2 d + 1), else (d, d + size)
};

// Pages that a sequence has behind it in fewer bits (KIVI, Liu et al., arXiv:2402.02750): of keys a
// channel has a range of its own, of values a token. Layers with a window keep theirs as they are.
struct KvCoding {
  int32_t bits = 0;        // 4 or 2; 0: pages stay as they were written
  int32_t residual = 128;  // the newest tokens, whose pages stay so
  // Of what the codes of a page's keys, and of its values, lack (GEAR, Kang et al.,
  // arXiv:2403.05527): factors of this rank (at most 16) and so many numbers (256) of each head.
  int32_t rank = 0;
  int32_t outliers = 0;
  // Bits are of so many features of all heads together (CSKV, Wang et al., arXiv:2409.10593), a
  // multiple of 16, beyond 256 of 16 in each of equal parts of at most that; 0: of keys and values.
  // `basis` is bfloat16 [encoded layers][keys, values][features][num_kv_heads * head_dim], rows of
  // each nearly orthonormal; keys are meant as they were before their rotation. So many
  // neighbouring encoded layers have features in common, sums over them (xKV, Chang et al.,
  // arXiv:2503.18893), whose rows are orthonormal all together; the last ones may be fewer.
  int32_t features = 0;
  int32_t shared_layers = 1;
  std::shared_ptr<const std::vector<uint16_t>> basis = nullptr;
  // In place of ranges, 2 bits are numbers of vectors of 4 dimensions (CommVQ, Li et al.,
  // arXiv:2506.18879): bfloat16 [encoded layers][keys, values][num_kv_heads][head_dim / 4][256][4],
  // keys as they were before their rotation, those of vector g pairs 2 g and 2 g + 1 that it turns,
  // and behind all pairs neighbours.
  std::shared_ptr<const std::vector<uint16_t>> codebooks = nullptr;
};

struct KvCacheConfig {
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  DType dtype = DType::bf16;  // f32, f16, bf16 or i8
  int32_t num_pages = 0;
  Device device = {};  // whose memory holds the pages
  // Every layer in one of them; none: one group of all layers. Those without a window, at least
  // one, come first, and their layers, one group behind the other, ascend: a sequence may keep
  // another number of keys in each. Each has num_pages pages, which take memory when they are first
  // written, a GPU's at once: a text has room where the fullest group has. Several without a window
  // not beside coding (Unsupported).
  std::vector<KvGroup> groups = {};
  std::vector<KvRope> rope = {};  // by layer, for reposition(); none: it is not known
  // Keys are rotated by their places in chunks (attention's `chunk`), so they stay in their slots:
  // retain(), reorder(), evict() and reposition() are Unsupported.
  bool fixed_slots = false;
  // Of each layer, where they are on several devices: a page is then a slot in each memory. Empty:
  // all are on `device`.
  std::vector<Device> layer_devices = {};
  // Of bf16 or f32: else Unsupported. Pages of both kinds together take at most the memory of
  // num_pages pages as they are written; an encoded one takes 28 % (4 bits) or 17 % (2 bits) of
  // bf16's bytes. What encoding frees goes back to the system. On a GPU they lie in whole pages, 3
  // (4 bits) or 5 (2 bits) in each, and are encoded on the host. Where a GPU has some of the layers
  // as many take a page's memory on the host, too; layers that share features are on one device
  // (else Unsupported).
  KvCoding coding = {};
  // Keys, 64, 32, 16 or 1, that an index of generated rows chooses together; 0: none does. Of each
  // 64, 32 or 16 in full pages bounds are kept, 1.6 %, 3.1 % or 6.3 % more memory with bf16, in
  // layers without a window and in groups that are `indexed`. Not beside coding: Unsupported.
  int32_t index_unit = 0;
  bool index_means = false;  // of each unit the mean is kept, in half of that, in place of bounds
  // Of units of 1: bits that are kept of each key of full pages, for an index that hashes keys. Of
  // one hash: executables that share a cache have the same.
  int32_t index_bits = 0;

  // Whether the host's memory holds all of it.
  bool on_host() const { return device.kind == DeviceKind::cpu && layer_devices.empty(); }
  Device device_of(int32_t layer) const {
    return layer_devices.empty() ? device : layer_devices[static_cast<size_t>(layer)];
  }
};

class ThreadPool;
using SequenceId = int64_t;

// Slots of one (layer, KV head) that become one: K and V of `into` are the weighted sums.
struct KvMerge {
  int32_t head = 0;            // layer of the group * num_kv_heads + KV head
  int32_t into = 0;            // slot
  std::vector<int32_t> slots;  // that are summed; `into` only if it is among them
  std::vector<float> weights;  // of each, finite
};

// Which cached prefixes a sequence may begin with, and what of its own may be cached.
struct PrefixKey {
  uint64_t methods = 0;  // that made the pages; those with other keys are not its own
  // What they made of a token depends on those that follow it, up to a multiple of `unit` tokens: a
  // prefix is whole units, and whole pages.
  int64_t unit = 1;
  int64_t most = std::numeric_limits<int64_t>::max();  // tokens of a prefix
  // Whether pages will be encoded, where the cache does that: a prefix ends where they are due.
  bool encodes = true;
};

class EFFINFER_API KvCache {
 public:
  static constexpr int32_t kPageSize = 64;
  // Committed tokens that can always be rolled back in a group with a window.
  static constexpr int32_t kSlack = 64;
  // Pages that hold so many tokens.
  static constexpr size_t pages_for(size_t tokens) { return (tokens + kPageSize - 1) / kPageSize; }

  // Allocates the pool (zeroed lazily by the system). Throws OutOfMemory, InvalidArgument.
  explicit KvCache(const KvCacheConfig& config);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const KvCacheConfig& config() const;
  size_t num_bytes() const;
  int32_t free_pages() const;       // whole pages free now, without evicting cached prefixes
  int32_t available_pages() const;  // free + cached prefixes that no sequence uses
  int32_t num_groups() const;
  int32_t num_whole_groups() const;  // the first ones, which are without a window
  size_t used_bytes() const;         // of the pages that sequences or cached prefixes hold

  // A sequence whose prompt is `tokens`. It starts with the whole pages of the longest cached
  // prefix, shared and committed; `cached` (may be null) receives how many tokens that is, always
  // fewer than tokens.size() so that there is one to compute. The caller appends the others. `key`
  // holds for what the sequence caches, too; without one it is that of plain requests.
  SequenceId create(std::span<const int32_t> tokens, int32_t* cached = nullptr);
  SequenceId create(std::span<const int32_t> tokens, int32_t* cached, const PrefixKey& key);
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
  // Drops the last `count` tokens. Throws InvalidArgument for tokens that came before keys were
  // dropped, and where a window's keys would be missed (can_rollback).
  void rollback(SequenceId sequence, int64_t count);
  bool can_rollback(SequenceId sequence, int64_t count) const;
  // Caches the whole committed pages for reuse by later sequences; the sequence goes on. Of groups
  // with a window these are the pages that it still holds: a prefix is reused up to where the
  // window behind it is cached, too, and a sequence that finds less of a prefix than is known
  // leaves its window there as it passes. Does nothing after keys were dropped.
  void publish(SequenceId sequence);
  // Drops the sequence. With `keep_prefix` its whole committed pages stay cached for reuse until
  // they are evicted, least recently used first.
  void release(SequenceId sequence, bool keep_prefix = true);
  // Forgets all cached prefixes.
  void clear_prefixes();

  // Residency: these change which keys a sequence has. They need every token committed, copy pages
  // that others read, free those that nobody needs, and throw InvalidArgument (OutOfMemory, when
  // there is no page for a copy) with nothing changed. Whichever device holds the pages, bits are
  // the same. A "head" is a (layer, KV head) of the group: layer of the group * num_kv_heads + KV
  // head. The sequence is never published afterwards, and cannot be rolled back to before.

  // Keeps these slots of a group without a window, in order. `slots`: one list for all heads, or
  // one for each; strictly increasing, all of one length, which is at least 1.
  void retain(SequenceId sequence, int32_t group, std::span<const std::vector<int32_t>> slots);
  // Slot i of a head becomes what slot list[i] was: each list has all slots of a group without a
  // window, once. What a GPU holds of them goes through the host.
  void reorder(SequenceId sequence, int32_t group, std::span<const std::vector<int32_t>> slots);
  // Drops slots [begin, end), not all. A multiple of 64 of them costs a page table and at most one
  // page's copy.
  void evict(SequenceId sequence, int32_t group, int64_t begin, int64_t end);
  // Sums K and V of slots; drops none. Several merges of a head see each other's results in order.
  // What a GPU holds of them goes through the host.
  void merge(SequenceId sequence, int32_t group, std::span<const KvMerge> merges);
  // Rotates the keys from a slot on (`from`: one for each group, or one for all) by `delta`
  // positions, and moves the next position. Each rotation rounds to the type of the cache.
  void reposition(SequenceId sequence, std::span<const int64_t> from, int64_t delta);

  // Encoding (KvCacheConfig::coding; else nothing is due). Pages are encoded when encode() is
  // called, by the order of their slots: sequences that share a page share what is made of it. They
  // are never published, cannot be rolled back into, and a sequence that has some can be neither
  // retained, evicted, merged nor repositioned (Unsupported).

  // Encodes the pages that are due: whole ones of committed slots, `residual` slots behind. Throws
  // OutOfMemory, with nothing changed, where others need them as they are and no page is free.
  void encode(SequenceId sequence, ThreadPool& pool);
  bool can_encode(SequenceId sequence) const;
  // Slots behind the committed ones until the next page is due: so many rows of a step read the
  // same pages, encoded or not, as if each had a step of its own.
  int64_t slots_before_encoding(SequenceId sequence) const;
  int64_t encoded_pages(
      SequenceId sequence) const;  // the first ones, of the group without a window

  // Keys and values of a head of a group without a window as floats [slots][head_dim]; an empty
  // span: they are not wanted. Throws InvalidArgument for other sizes and heads, Unsupported for a
  // sequence with encoded pages.
  void read(SequenceId sequence, int32_t group, int32_t head, std::span<float> keys,
            std::span<float> values) const;

  // Planes: numbers by slot of the groups without a window, which fork, rollback, keep, retain,
  // reorder, evict, export and import carry along; merge and reposition leave them as they are.
  // They are the sequence's own where it shares pages, too, as they say what its rows made of keys.

  // Zeros, as new slots have. Throws InvalidArgument for a name that the sequence has.
  void add_plane(SequenceId sequence, std::string_view name);
  // Of all heads of these groups, and as many slots as the longest of their tables has; behind the
  // slots of a shorter one are zeros. Good until the sequence grows. Throws InvalidArgument for a
  // name that it lacks.
  SlotPlane plane(SequenceId sequence, std::string_view name);

  // A sequence's tokens, counts, keys, values and planes as bytes in the machine's memory, and a
  // sequence like it made of them, whoever had its pages since. Throws InvalidArgument where the
  // blob is not of a cache of this layout, OutOfMemory where there are not enough pages; nothing is
  // changed.
  std::vector<std::byte> export_(SequenceId sequence) const;
  SequenceId import_(std::span<const std::byte> blob);

  int64_t length(SequenceId sequence) const;     // tokens appended
  int64_t committed(SequenceId sequence) const;  // of these, tokens whose K and V are written
  int64_t slots(SequenceId sequence, int32_t group = 0) const;  // places of a group's table
  int64_t most_slots(SequenceId sequence) const;  // of the longest table without a window
  // Heads before those of a group without a window in planes, of num_whole_groups(): all of them.
  int64_t first_plane_head(int32_t group) const;
  // Tokens that its last pages and those that are free have room for.
  int64_t free_slots(SequenceId sequence) const;
  int64_t next_position(SequenceId sequence) const;  // of the token appended next
  bool is_prefix(SequenceId sequence) const;         // no key was dropped, merged or moved
  size_t used_bytes(SequenceId sequence) const;
  // Of a group's table: ceil(slots / 64). Of a window the first few may be -1: freed, never read.
  std::span<const int32_t> pages(SequenceId sequence, int32_t group = 0) const;
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
