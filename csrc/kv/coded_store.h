// A pool's coded pages (ops/coded_pages.h), and which page each was made of: whoever shares a page
// with others has the same one made of it. On the host they have memory of their own, which the
// system gives when it is written; on a GPU they are parts of pages that the pool hands over. Where
// layers are on both, each is in the memory of its layers, with the numbers of a GPU's: the host's
// part of a page that is handed over goes back to the system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "effinfer/kv_cache.h"
#include "kv/codebook_tables.h"
#include "kv/device_tables.h"
#include "kv/feature_tables.h"
#include "ops/coded_pages.h"
#include "ops/kv_layout.h"

namespace effinfer::kv {

// How many coded pages of so many layers take the memory of `pool_bytes`, or of the config's pages
// on a GPU. Their ids follow those of the pool, and are int32.
int32_t num_coded_pages(const KvCacheConfig& config, int64_t num_layers, size_t pool_bytes);

class CodedStore {
 public:
  // As many as that. Throws InvalidArgument, Unsupported for what no page can be made of,
  // OutOfMemory.
  CodedStore(const KvCacheConfig& config, size_t pool_bytes);

  // As kernels of the layer's device see them, beside its pages, and as the host encodes them,
  // whose `data` are to be set.
  ops::CodedPages layer(size_t number, std::span<const ops::KvLayer> pages) const;
  ops::CodedPages host_layer(size_t number) const;
  size_t page_bytes() const;  // over all layers
  // Of those that have one in common, and how many these are.
  size_t layer_page_bytes() const { return page_bytes() / num_layers_; }
  size_t shared_layers() const { return shared_layers_; }
  int32_t num_coded() const { return num_coded_; }
  int32_t in_use() const { return in_use_; }

  // Whether they are parts of the pool's pages, of one, and how many of these so many more take.
  bool in_pages() const { return parts_ > 0; }
  bool is_parts(int32_t page) const {
    return in_pages() && used_parts_[static_cast<size_t>(page)] >= 0;
  }
  size_t pages_for(size_t count) const;
  // A page of the pool becomes parts, which are free.
  void add_parts(int32_t page);

  // There must be one free: a page and what is made of it are not both in the pool for long.
  bool has_free() const { return !free_.empty(); }
  int32_t take();
  // Returns a page that is the pool's again, or -1.
  int32_t put_back(int32_t coded);

  // What was made of a page that has kept its numbers, and is in use, or -1.
  int32_t coding_of(int32_t page) const;
  void link(int32_t page, int32_t coded);
  // Of a page, or of a coded one.
  void unlink(int32_t page);

  // Marks what is free, by id, and pages that are parts. Throws InternalError where links
  // contradict each other.
  void check(std::span<uint8_t> is_free) const;

 private:
  void place_layers(const KvCacheConfig& config);
  void allocate();
  void set_tables(const KvCacheConfig& config);

  ops::CodedPages first_layer_;
  std::unique_ptr<FeatureTables> features_;    // null: codes are of keys and values
  std::unique_ptr<CodebookTables> codebooks_;  // null: they are of ranges
  std::map<int32_t, DeviceTables> there_;      // of each GPU
  // By layer, in the memory of its device; null: there are none.
  std::vector<const ops::PageFeatures*> features_of_;
  std::vector<const ops::PageCodebooks*> codebooks_of_;
  // By what has pages of its own: which of those on the host; -1: it is on a GPU.
  std::vector<int32_t> host_place_;
  size_t num_on_host_ = 0;
  size_t layer_bytes_ = 0;
  size_t num_layers_ = 0;     // that have pages of their own
  size_t shared_layers_ = 1;  // which share one's pages
  int32_t num_pages_ = 0;     // of the pool
  int32_t num_coded_ = 0;
  int32_t in_use_ = 0;
  int32_t layer_parts_ = 0;  // ops::CodedMemory; 0: they have memory of their own
  int32_t parts_ = 0;
  std::shared_ptr<void> region_;
  std::vector<int32_t> used_parts_;  // of each page of the pool; -1: it is none
  std::vector<int32_t> partner_;     // by id, of pages and of coded ones; -1: none
  std::vector<int32_t> free_;        // a stack
};

}  // namespace effinfer::kv
