// The file format of the pack cache (effinfer/pack_cache.h says what it promises).
//
//   header   128 bytes: magic "EFFIPACK", version of the packed layout u32, number of weights u32,
//            sizes of table, data and file u64 x 3, offset of the data u64, key, digest of the
//            table, digest of the data, zeros, digest of all before it (16 bytes each)
//   table    a weight: name length u32, name, dtype u32, rows u64, cols u64, offset in data u64,
//            bytes u64
//   zeros    up to a multiple of 4096
//   data     the packed weights one after the other, each 64-byte aligned
//
// All numbers are little-endian.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/digest.h"
#include "effinfer/compiler.h"
#include "effinfer/pack_cache.h"
#include "io/mapped_file.h"
#include "ops/packed_weight.h"

namespace effinfer::weights {

// A weight that is packed, and where its packed bytes lie in the region of all.
struct PackedItem {
  std::string name;
  TensorView source;
  ops::PackedWeight shape;  // without data
  std::optional<WeightOrigin> origin;
  ops::TernaryForm form = ops::TernaryForm::u4;
  size_t offset = 0;
};

// The matrices of all matmuls of a graph, in the order in which the source has them.
struct PackPlan {
  std::vector<PackedItem> items;
  size_t num_bytes = 0;
  // Throws Unsupported for a weight that ternary and other matmuls read.
  static PackPlan of(const Graph& graph, const WeightSource& source, TernaryPacking packing,
                     const Target& target);
  // Without the items that are somewhere already.
  void drop(const std::function<bool(const std::string& name)>& is_there);

 private:
  void place();  // one behind the other
};

class PackCache {
 public:
  // An empty folder turns the cache off. Never throws for what is wrong with files: report() says.
  PackCache(const PackPlan& plan, std::string folder, ThreadPool& pool);

  // The packed bytes of all items, mapped from the cached file; empty when there is none to use.
  struct Mapping {
    std::shared_ptr<MappedFile> file;
    const uint8_t* data = nullptr;
  };
  Mapping load();
  // To be called after load() found nothing.
  void store(const uint8_t* data);

  const PackCacheReport& report() const { return report_; }

 private:
  Digest key() const;
  std::string file_stem() const;
  void remove_older_versions() const;
  std::string table() const;
  std::string header(const std::string& table, const Digest& data_digest) const;
  std::string find_damage(std::span<const uint8_t> bytes, size_t& data_begin) const;
  void check_sources() const;

  const PackPlan& plan_;
  std::string folder_;
  ThreadPool& pool_;
  Digest key_;
  PackCacheReport report_;
};

}  // namespace effinfer::weights
