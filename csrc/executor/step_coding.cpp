#include "executor/step_coding.h"

#include <algorithm>

#include "effinfer/kv_cache.h"

namespace effinfer::executor {

size_t StepCoding::most_pages(const BatchLimits& limits) {
  return static_cast<size_t>(limits.max_sequences) *
         KvCache::pages_for(static_cast<size_t>(limits.max_seq_len));
}

void StepCoding::reserve(const ops::KvLayer& layer, const BatchLimits& limits) {
  const ops::CodedPages& coded = layer.coded;
  first_page_ = coded.first_page;
  const auto ids = static_cast<size_t>(layer.num_pages) * static_cast<size_t>(coded.memory.parts);
  place_of_.resize(ids, -1);
  room_ = std::min(ids, most_pages(limits));
  const size_t bytes = room_ * layer.head_bytes() * static_cast<size_t>(layer.num_kv_heads);
  if (bytes <= bytes_) return;
  keys_ = values_ = nullptr;
  bytes_ = 0;
  keys_ = allocate_(bytes, "a layer's encoded pages as attention reads them");
  values_ = allocate_(bytes, "a layer's encoded pages as attention reads them");
  bytes_ = bytes;
}

std::span<const int32_t> StepCoding::find(std::span<const int32_t> pages) {
  numbers_.clear();
  pages_.assign(pages.begin(), pages.end());
  for (int32_t& page : pages_) {
    if (page < first_page_) continue;
    const int32_t number = page - first_page_;
    int32_t& place = place_of_[static_cast<size_t>(number)];
    if (place < 0) {
      place = static_cast<int32_t>(numbers_.size());
      numbers_.push_back(number);
    }
    page = first_page_ + place;
  }
  for (const int32_t number : numbers_) place_of_[static_cast<size_t>(number)] = -1;
  return pages_;
}

}  // namespace effinfer::executor
