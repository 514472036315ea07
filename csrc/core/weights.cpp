#include "effinfer/weights.h"

#include <algorithm>
#include <utility>

#include "core/mapped_pages.h"
#include "effinfer/error.h"

namespace effinfer {

void WeightSource::release(std::string_view, size_t, size_t) const {}

void MemoryWeights::add(std::string name, const TensorView& view, std::shared_ptr<void> owner,
                        bool is_mapped) {
  view.num_bytes();  // rejects shapes that do not fit the dtype
  entries_[std::move(name)] = Entry{view, std::move(owner), is_mapped};
}

void MemoryWeights::release(std::string_view name, size_t begin, size_t end) const {
  const auto entry = entries_.find(name);
  if (entry == entries_.end() || !entry->second.is_mapped) return;
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
