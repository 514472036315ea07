// Planes of a sequence (effinfer/slot_plane.h): how they grow and move with its slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "effinfer/device.h"
#include "effinfer/slot_plane.h"

namespace effinfer::kv {

// Numbers in the host's memory: where a GPU holds keys, in pinned memory, which its kernels read
// and write where it is.
class PlaneNumbers {
 public:
  explicit PlaneNumbers(Device device = {}) : device_(device) {}
  PlaneNumbers(Device device, size_t size);  // zeros
  PlaneNumbers(const PlaneNumbers& other);
  PlaneNumbers& operator=(const PlaneNumbers& other) { return *this = PlaneNumbers(other); }
  PlaneNumbers(PlaneNumbers&&) = default;
  PlaneNumbers& operator=(PlaneNumbers&&) = default;

  Device device() const { return device_; }
  size_t size() const { return size_; }
  float* data() const { return values_.get(); }

 private:
  Device device_;
  size_t size_ = 0;
  std::shared_ptr<float> values_;
};

// Heads [begin, end), of layers that have one page table.
struct PlaneRows {
  int64_t begin = 0;
  int64_t end = 0;
};

struct Plane {
  std::string name;
  int64_t num_heads = 0;
  int64_t stride = 0;   // slots that there is room for
  PlaneNumbers values;  // [num_heads][stride]

  SlotPlane view(int64_t num_slots) { return {values.data(), stride, num_heads, num_slots}; }
  // Of some heads: slots [first, end) are new, or have none any more: zeros.
  void add(PlaneRows heads, int64_t first, int64_t end);
  // Slot first + rows[i] becomes first + i; rows strictly increase.
  void close_up(PlaneRows heads, int64_t first, std::span<const int32_t> rows);
  // Slot i of the n-th of the heads becomes what slot lists[n][i] was, or lists[0][i] of one list
  // for all.
  void retain(PlaneRows heads, std::span<const std::vector<int32_t>> lists);
  // The same of lists that are all slots in another order.
  void reorder(PlaneRows heads, std::span<const std::vector<int32_t>> lists);
  // Slots [begin, end) go; those behind, up to num_slots, move up.
  void evict(PlaneRows heads, int64_t begin, int64_t end, int64_t num_slots);
};

}  // namespace effinfer::kv
