#include "effinfer/weights.h"

#include <utility>

#include "effinfer/error.h"

namespace effinfer {

void MemoryWeights::add(std::string name, const TensorView& view, std::shared_ptr<void> owner) {
  view.num_bytes();  // rejects shapes that do not fit the dtype
  entries_[std::move(name)] = Entry{view, std::move(owner)};
}

bool MemoryWeights::contains(std::string_view name) const {
  return entries_.contains(name);
}

TensorView MemoryWeights::weight(std::string_view name) const {
  const auto entry = entries_.find(name);
  if (entry == entries_.end()) {
    throw InvalidArgument("[weights] no weight named \"" + std::string(name) + "\"");
  }
  return entry->second.view;
}

}  // namespace effinfer
