#include "core/backend.h"

#include "core/copy_rate.h"
#include "core/memory.h"
#include "effinfer/error.h"

namespace effinfer {

// Of a library without csrc/cuda, whose definition comes before this one.
[[gnu::weak]] const Backend* cuda_backend() {
  return nullptr;
}

// Nor has it a GPU to ask for.
[[gnu::weak]] double cuda_copy_rate(int) {
  return 0;
}

Queue::~Queue() = default;
Recording::~Recording() = default;

namespace {

const Backend& backend_of(Device device, const char* argument) {
  check_device(device, argument);
  if (device.kind == DeviceKind::cpu) {
    throw InvalidArgument(std::string(argument) + ": expected a GPU, got \"cpu\"");
  }
  return *cuda_backend();
}

}  // namespace

std::unique_ptr<Queue> make_queue(Device device) {
  return backend_of(device, "[queue] device").make_queue(device.index);
}

std::unique_ptr<Queue> wrap_stream(Device device, void* stream) {
  return backend_of(device, "[queue] device").wrap_stream(device.index, stream);
}

std::shared_ptr<void> allocate_memory(Device device, size_t bytes) {
  const Memory& memory = backend_of(device, "[memory] device").memory(device.index);
  std::shared_ptr<void> handle = memory.allocate(bytes, Pages::heap);
  if (handle == nullptr) {
    throw OutOfMemory("[memory] " + name(device) + " has no " + std::to_string(bytes) + " bytes");
  }
  return handle;
}

}  // namespace effinfer
