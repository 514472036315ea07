#include "compiler/place_layers.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

namespace effinfer::compiler {
namespace {

// Of the free memory what nobody counts: recordings of steps, partial results, the driver's own.
size_t usable(size_t bytes) {
  return bytes - bytes / 16;
}

std::string gigabytes(double bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(bytes < 1e9 ? 3 : 1) << bytes / 1e9 << " GB";
  return out.str();
}

std::string reads(const LayerDevice& device) {
  return device.name + " reads memory at " + gigabytes(device.rate) + "/s";
}

}  // namespace

LayerChoice choose_layers(int32_t layers, const LayerDevice& front, const LayerDevice& back,
                          bool one_memory) {
  if (one_memory) {
    const double share = front.rate / (front.rate + back.rate);
    const auto wanted = static_cast<int32_t>(std::lround(share * layers));
    return {std::clamp(wanted, 1, layers - 1), reads(front) + ", " + reads(back)};
  }
  const bool is_front = front.rate >= back.rate;
  const LayerDevice& fast = is_front ? front : back;
  const LayerDevice& slow = is_front ? back : front;
  const size_t room = usable(fast.free_bytes);
  int32_t most = 0;
  for (int32_t beyond = layers + 1; most + 1 < beyond;) {
    const int32_t middle = most + (beyond - most) / 2;
    (fast.bytes_of(middle) <= room ? most : beyond) = middle;
  }
  std::string reason = reads(fast) + " and " + slow.name + " at " + gigabytes(slow.rate) +
                       "/s; of " + gigabytes(static_cast<double>(fast.free_bytes)) +
                       " that are free there ";
  reason += most == 0 ? "none is enough for a layer, which with what all need takes " +
                            gigabytes(static_cast<double>(fast.bytes_of(1)))
                      : std::to_string(most) + " layers take " +
                            gigabytes(static_cast<double>(fast.bytes_of(most)));
  if (most > 0 && most < layers) {
    reason += ", and one more " + gigabytes(static_cast<double>(fast.bytes_of(most + 1)));
  }
  return {is_front ? most : layers - most, reason};
}

}  // namespace effinfer::compiler
