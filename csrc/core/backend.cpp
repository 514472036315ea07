#include "core/backend.h"

#include "effinfer/error.h"

namespace effinfer {

// Of a library without csrc/cuda, whose definition comes before this one.
[[gnu::weak]] const Backend* cuda_backend() {
  return nullptr;
}

std::unique_ptr<Queue> make_queue(Device device) {
  check_device(device, "[queue] device");
  if (device.kind == DeviceKind::cpu) {
    throw InvalidArgument("[queue] device: expected a GPU, got \"cpu\"");
  }
  return cuda_backend()->make_queue(device.index);
}

}  // namespace effinfer
