// The weights of an executable: each is checked once, packed once, converted once.
//
// The matrices of all matmuls are packed one after the other into one region of memory, in the
// order in which the source has them; the source's pages are dropped as they have been read, so
// that a model is never in memory twice.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/memory.h"
#include "effinfer/compiler.h"
#include "effinfer/graph.h"
#include "effinfer/threads.h"
#include "effinfer/weights.h"
#include "ops/packed_weight.h"
#include "weights/pack_cache.h"

namespace effinfer::weights {

class WeightStore {
 public:
  // What became of a weight, for explain().
  struct Use {
    std::string name;
    DType source;
    std::string form;  // "packed u4 direct+min", "as in the file", "f32"
    size_t source_bytes;
    size_t bytes;  // of our own: 0 for what is used where it lies
  };

  // What `base` (null: none) has of the same weights is used and not made again.
  WeightStore(std::shared_ptr<const WeightSource> source, ThreadPool& pool, const Memory& memory,
              std::shared_ptr<const WeightStore> base = nullptr);

  // Throws InvalidArgument unless the source has every weight with its dtype and shape.
  void check(const Graph& graph) const;
  // Packs the matrices of all matmuls of the graph, or maps them from the options' pack cache.
  // Throws OutOfMemory, and Unsupported for a weight that ternary and other matmuls read.
  void pack(const Graph& graph, const CompileOptions& options);

  // Drops the source's pages of all weights but those that are used where they lie: after lowering.
  void release_source(const Graph& graph) const;

  bool is_packed(const Value& value) const { return packed_.contains(value.weight_name); }
  const ops::PackedWeight& packed(const Value& value);  // a matrix of a matmul
  // A matrix that no matmul reads, packed for itself: GPUs read no file's own blocks.
  const ops::PackedWeight& pack_alone(const Value& value);
  TensorView raw(const Value& value);       // as the source has it
  const float* floats(const Value& value);  // a vector of f32, f16 or bf16
  // The same for the host, whatever the device.
  std::vector<float> host_floats(const Value& value) const;

  std::vector<ops::PackedWeight> all_packed() const;
  size_t packed_bytes() const { return packed_bytes_; }  // without those of the base
  const std::vector<Use>& uses() const { return uses_; }
  const PackCacheReport& pack_cache() const { return pack_cache_; }

 private:
  std::shared_ptr<const WeightSource> source_;
  ThreadPool& pool_;
  const Memory& memory_;
  void pack_items(const PackPlan& plan, uint8_t* out);
  std::shared_ptr<void> allocate(const Memory& memory, size_t bytes) const;
  // On the device what lies at `data` on the host; the same where the device is the CPU.
  const uint8_t* place(const uint8_t* data, size_t bytes);

  const std::shared_ptr<const WeightStore> base_;
  std::vector<std::shared_ptr<void>> regions_;  // of packed weights: memory, or a mapped file
  PackCacheReport pack_cache_;
  size_t packed_bytes_ = 0;
  std::map<std::string, ops::PackedWeight> packed_;
  std::map<std::string, std::shared_ptr<void>> floats_;
  std::vector<Use> uses_;
};

}  // namespace effinfer::weights
