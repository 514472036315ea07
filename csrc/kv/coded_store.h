// The memory of a pool's coded pages (ops/coded_pages.h), and which page each was made of: whoever
// shares a page with others has the same one made of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "effinfer/kv_cache.h"
#include "kv/codebook_tables.h"
#include "kv/feature_tables.h"
#include "ops/coded_pages.h"

namespace effinfer::kv {

// How many coded pages of so many layers take the memory of `pool_bytes`. Their ids follow those of
// the pool, and are int32.
int32_t num_coded_pages(const KvCacheConfig& config, int64_t num_layers, size_t pool_bytes);

class CodedStore {
 public:
  // As many as that. Throws InvalidArgument, Unsupported for what no page can be made of,
  // OutOfMemory.
  CodedStore(const KvCacheConfig& config, size_t pool_bytes);

  ops::CodedPages layer(size_t number) const;
  size_t page_bytes() const;  // over all layers
  // Of those that have one in common, and how many these are.
  size_t layer_page_bytes() const { return page_bytes() / num_layers_; }
  size_t shared_layers() const { return shared_layers_; }
  int32_t num_coded() const { return num_coded_; }
  int32_t in_use() const { return num_coded_ - static_cast<int32_t>(free_.size()); }

  // There must be one free: a page and what is made of it are not both in the pool for long.
  int32_t take();
  void put_back(int32_t coded);

  // What was made of a page that has kept its numbers, and is in use, or -1.
  int32_t coding_of(int32_t page) const;
  void link(int32_t page, int32_t coded);
  // Of a page, or of a coded one.
  void unlink(int32_t page);

  // Marks what is free, by id. Throws InternalError where links contradict each other.
  void check(std::span<uint8_t> is_free) const;

 private:
  ops::CodedPages first_layer_;
  std::unique_ptr<FeatureTables> features_;    // null: codes are of keys and values
  std::unique_ptr<CodebookTables> codebooks_;  // null: they are of ranges
  size_t layer_bytes_ = 0;
  size_t num_layers_ = 0;     // that have pages of their own
  size_t shared_layers_ = 1;  // which share one's pages
  int32_t num_pages_ = 0;     // of the pool
  int32_t num_coded_ = 0;
  std::shared_ptr<void> region_;
  std::vector<int32_t> partner_;  // by id, of pages and of coded ones; -1: none
  std::vector<int32_t> free_;     // a stack
};

}  // namespace effinfer::kv
