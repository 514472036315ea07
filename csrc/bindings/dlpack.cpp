#include "bindings/dlpack.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/device_array.h"
#include "bindings/dlpack_abi.h"
#include "bindings/module.h"
#include "effinfer/device.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

using dlpack::ElementType;
using dlpack::ManagedTensor;
using dlpack::Tensor;
using dlpack::VersionedTensor;

// The device of DLPack's number; memory that CUDA and ROCm pin is the CPU's. Throws InvalidArgument
// for one that this build lacks.
Device device_of(int32_t type, int32_t id, const std::string& argument) {
  constexpr std::pair<int32_t, const char*> kNames[] = {
      {2, "cuda"},  {4, "opencl"},        {7, "vulkan"},  {8, "metal"},
      {10, "rocm"}, {13, "cuda_managed"}, {14, "oneapi"},
  };
  if (type == 1 || type == 3 || type == 11) return {};
  std::string text = "DLPack device " + std::to_string(type);
  for (const auto& [number, name] : kNames) {
    if (number == type) text = name;
  }
  return parse_device(text + ":" + std::to_string(id), argument);
}

// Null where no numpy type, tagged or not, stands for the element type.
py::object numpy_type(const ElementType& type) {
  constexpr struct {
    uint8_t code;
    uint8_t bits;
    const char* name;
  } kTypes[] = {
      {0, 8, "int8"},     {0, 32, "int32"},   {0, 64, "int64"}, {1, 8, "uint8"},
      {2, 16, "float16"}, {2, 32, "float32"}, {4, 16, "bf16"},  {6, 8, "bool"},
      {10, 8, "f8_e4m3"}, {12, 8, "f8_e5m2"},
  };
  for (const auto& known : kTypes) {
    if (type.lanes != 1 || type.code != known.code || type.bits != known.bits) continue;
    if (known.code == 4 || known.code > 6) return numpy_dtype(parse_dtype(known.name));
    return py::dtype(known.name);
  }
  return {};
}

// Takes the tensor out of its capsule: from here on it is ours to release.
template <class Managed>
py::capsule take(const py::capsule& capsule) {
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), Managed::kName));
  if (managed == nullptr) throw py::error_already_set();
  py::capsule owner(managed, [](void* pointer) {
    auto* tensor = static_cast<Managed*>(pointer);
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  });
  if (PyCapsule_SetName(capsule.ptr(), Managed::kUsedName) != 0) throw py::error_already_set();
  return owner;
}

py::dtype dtype_of(const Tensor& tensor, const std::string& argument) {
  const py::object type = numpy_type(tensor.type);
  if (type) return py::reinterpret_borrow<py::dtype>(type);
  throw InvalidArgument(argument + ": expected " + kKnownElements + ", got DLPack type " +
                        std::to_string(tensor.type.code) + " of " +
                        std::to_string(tensor.type.bits) + " bits");
}

py::object array_over(const Tensor& tensor, bool read_only, const py::capsule& owner,
                      const py::dtype& dtype) {
  const py::ssize_t item = tensor.type.bits / 8;
  const auto rank = static_cast<size_t>(tensor.rank);
  std::vector<py::ssize_t> shape(rank);
  std::vector<py::ssize_t> strides(rank);
  py::ssize_t compact = item;
  bool empty = false;
  for (size_t axis = rank; axis-- > 0;) {
    shape[axis] = tensor.shape[axis];
    strides[axis] = tensor.strides != nullptr ? tensor.strides[axis] * item : compact;
    compact *= shape[axis];
    empty = empty || shape[axis] == 0;
  }
  if (empty || tensor.data == nullptr) return py::array(dtype, shape);
  py::array array(dtype, shape, strides, static_cast<std::byte*>(tensor.data) + tensor.byte_offset,
                  owner);
  if (read_only) array.attr("setflags")(py::arg("write") = false);
  return array;
}

py::object device_array_over(const Tensor& tensor, bool read_only, const py::capsule& owner,
                             const py::dtype& dtype, const std::string& argument,
                             uintptr_t stream) {
  if (tensor.rank > kMaxRank) {
    throw InvalidArgument(argument + ": expected at most " + std::to_string(kMaxRank) +
                          " dimensions, got " + std::to_string(tensor.rank));
  }
  auto array = std::make_shared<DeviceArray>();
  Dims dims;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) dims.push_back(tensor.shape[axis]);
  std::byte* data = static_cast<std::byte*>(tensor.data);
  if (data != nullptr) data += tensor.byte_offset;
  array->view = StridedView::dense(data, bindings::dtype_of(dtype, argument), dims);
  array->view.device = {DeviceKind::cuda, tensor.device.id};
  if (tensor.strides != nullptr) {
    std::copy_n(tensor.strides, tensor.rank, array->view.strides.begin());
  }
  array->read_only = read_only;
  array->owner = owner;
  array->stream = stream;
  return py::cast(array);
}

template <class Managed>
py::object consume(const py::capsule& capsule, const std::string& argument, uintptr_t stream) {
  const py::capsule owner = take<Managed>(capsule);
  const auto* managed = owner.get_pointer<Managed>();
  if (!managed->known_version()) {
    throw InvalidArgument(argument + ": expected DLPack 1.x, got another version");
  }
  const Tensor& tensor = managed->tensor;
  const Device device = device_of(tensor.device.type, tensor.device.id, argument);
  const py::dtype dtype = dtype_of(tensor, argument);
  if (device == Device{}) return array_over(tensor, managed->read_only(), owner, dtype);
  return device_array_over(tensor, managed->read_only(), owner, dtype, argument, stream);
}

// Producers from before DLPack 1.0 take no version.
py::object export_capsule(const py::object& producer, const py::dict& options) {
  const py::object method = producer.attr("__dlpack__");
  try {
    return method(py::arg("max_version") = py::make_tuple(1, 0), **options);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return method(**options);
}

// The device is asked for before the export, in which it may copy or wait. A GPU's producer is told
// the stream that reads next: 1 is the name of the legacy default stream there.
py::object checked_export(const py::object& producer, const std::string& argument,
                          uintptr_t stream) {
  try {
    py::dict options;
    if (py::hasattr(producer, "__dlpack_device__")) {
      const py::tuple device = producer.attr("__dlpack_device__")();
      const Device found =
          device_of(device[0].cast<int32_t>(), device[1].cast<int32_t>(), argument);
      if (found.kind == DeviceKind::cuda) options["stream"] = stream == 0 ? 1 : stream;
    }
    return export_capsule(producer, options);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    throw InvalidArgument(argument + ": expected an array that can be shared, got: " +
                          std::string(py::str(error.value())));
  }
}

}  // namespace

py::object from_dlpack(const py::object& producer, const std::string& argument, uintptr_t stream) {
  const py::object exported = checked_export(producer, argument, stream);
  if (PyCapsule_IsValid(exported.ptr(), VersionedTensor::kName) != 0) {
    return consume<VersionedTensor>(py::reinterpret_borrow<py::capsule>(exported), argument,
                                    stream);
  }
  if (PyCapsule_IsValid(exported.ptr(), ManagedTensor::kName) != 0) {
    return consume<ManagedTensor>(py::reinterpret_borrow<py::capsule>(exported), argument, stream);
  }
  throw InvalidArgument(argument + ": expected a DLPack capsule of __dlpack__, got another object");
}

}  // namespace effinfer::bindings
