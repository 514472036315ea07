#include "kv/device_tables.h"

#include <string>

#include "effinfer/error.h"
#include "effinfer/kv_cache.h"

namespace effinfer::kv {

template <class T>
const T* DeviceTables::upload(const T* host, int64_t count) {
  if (count == 0) return nullptr;
  std::shared_ptr<void>& there = there_[host];
  if (!there) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    there = memory_.allocate(bytes, Pages::heap);
    if (!there) {
      throw OutOfMemory("[kv_cache] coding: no memory for tables of " + std::to_string(bytes) +
                        " bytes on " + name(memory_.device()));
    }
    memory_.copy(there.get(), host, bytes);
  }
  return static_cast<const T*>(there.get());
}

ops::KeyTurns DeviceTables::upload(const ops::KeyTurns& host) {
  ops::KeyTurns turns = host;
  const int64_t places = int64_t{host.num_places} * host.num_pairs;
  const int64_t tokens = int64_t{host.num_pairs} * KvCache::kPageSize;
  turns.place_cos = upload(host.place_cos, places);
  turns.place_sin = upload(host.place_sin, places);
  turns.token_cos = upload(host.token_cos, tokens);
  turns.token_sin = upload(host.token_sin, tokens);
  return turns;
}

const ops::PageFeatures& DeviceTables::add(const ops::PageFeatures& host) {
  ops::PageFeatures& layer = features_.emplace_back(host);
  const int64_t numbers = host.count * host.dims();
  layer.keys = layer.values = nullptr;  // encoding's
  layer.key_dims = upload(host.key_dims, numbers);
  layer.value_dims = upload(host.value_dims, numbers);
  layer.turns = upload(host.turns);
  return layer;
}

const ops::PageCodebooks& DeviceTables::add(const ops::PageCodebooks& host) {
  ops::PageCodebooks& layer = codebooks_.emplace_back(host);
  const int64_t numbers = host.books() * ops::PageCodebooks::kDims * ops::PageCodebooks::kVectors;
  layer.value_dims = layer.key_squares = layer.value_squares = nullptr;  // encoding's
  layer.order = nullptr;
  layer.keys = upload(host.keys, numbers);
  layer.values = upload(host.values, numbers);
  layer.turns = upload(host.turns);
  return layer;
}

}  // namespace effinfer::kv
