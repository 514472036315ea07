#include "effinfer/weights.h"

#include <algorithm>
#include <utility>

#include "core/mapped_pages.h"
#include "effinfer/error.h"

namespace effinfer {

void WeightSource::release(std::string_view, size_t, size_t) const {}
std::optional<WeightOrigin> WeightSource::origin(std::string_view) const {
  return std::nullopt;
}

std::optional<WeightOrigin> MemoryWeights::origin(std::string_view name) const {
  const auto entry = entries_.find(name);
  return entry == entries_.end() ? std::nullopt : entry->second.origin;
}

void MemoryWeights::add(std::string name, const TensorView& view, std::shared_ptr<void> owner,
                        std::optional<WeightOrigin> origin) {
  view.num_bytes();  // rejects shapes that do not fit the dtype
  entries_[std::move(name)] = Entry{view, std::move(owner), std::move(origin)};
}

void MemoryWeights::release(std::string_view name, size_t begin, size_t end) const {
  const auto entry = entries_.find(name);
  if (entry == entries_.end() || !entry->second.origin) return;
  const TensorView& view = entry->second.view;
  end = std::min(end, view.num_bytes());
  if (begin >= end) return;
  const auto* data = static_cast<const uint8_t*>(view.data);
  drop_mapped_pages({data + begin, end - begin});
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
