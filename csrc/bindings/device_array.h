// Arrays in the memory of a GPU, as Python sees them, and where operators run.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "bindings/module.h"
#include "effinfer/executor.h"
#include "effinfer/tensor.h"

namespace effinfer::bindings {

// A queue over a stream that somebody else has made.
struct StreamQueue {
  StreamQueue(const std::string& device, uintptr_t handle);

  uintptr_t stream;
  std::unique_ptr<Queue> queue;
};

struct DeviceArray {
  StridedView view;
  bool read_only = false;
  // What keeps the memory alive: a producer, a capsule, or the memory itself.
  py::object owner;
  std::shared_ptr<void> memory;
  uintptr_t stream = 0;  // in whose order its contents were put

  bool is_contiguous() const;
};

// An argument that may be numpy's or a GPU's.
using AnyArray = py::typing::Union<py::array, DeviceArray>;

// What `pool` of an operator may be.
using Where =
    std::optional<std::variant<std::shared_ptr<ThreadPool>, std::shared_ptr<StreamQueue>>>;

inline Executor executor_of(const Where& where) {
  if (!where) return default_pool();
  if (const auto* pool = std::get_if<std::shared_ptr<ThreadPool>>(&*where)) return **pool;
  return *std::get<std::shared_ptr<StreamQueue>>(*where)->queue;
}

// Where an operator writes its float32 result: a dense array on its device that is given, or a new
// one of numpy's.
struct Result {
  py::object array;
  float* data;
};
Result float32_result(const Dims& dims, const Where& where, const py::object& out,
                      const std::string& argument);

// An uninitialised array, for work in the order of a queue.
std::shared_ptr<DeviceArray> new_device_array(const Dims& dims, DType dtype,
                                              const StreamQueue& queue);

}  // namespace effinfer::bindings
