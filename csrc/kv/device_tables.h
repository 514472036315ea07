// What decoding needs of the tables of ops/page_features.h and ops/page_codebooks.h, in a GPU's
// memory.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>

#include "core/memory.h"
#include "ops/page_codebooks.h"
#include "ops/page_features.h"

namespace effinfer::kv {

class DeviceTables {
 public:
  explicit DeviceTables(const Memory& memory) : memory_(memory) {}

  // A layer's, of the host's. Throws OutOfMemory.
  const ops::PageFeatures& add(const ops::PageFeatures& host);
  const ops::PageCodebooks& add(const ops::PageCodebooks& host);

 private:
  // The same numbers there; those that layers share once.
  template <class T>
  const T* upload(const T* host, int64_t count);
  ops::KeyTurns upload(const ops::KeyTurns& host);

  const Memory& memory_;
  std::deque<ops::PageFeatures> features_;
  std::deque<ops::PageCodebooks> codebooks_;
  std::map<const void*, std::shared_ptr<void>> there_;  // by the host's addresses
};

}  // namespace effinfer::kv
