#include "bindings/dlpack.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/module.h"
#include "effinfer/device.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

// The binary interface of DLPack 1.x (https://dmlc.github.io/dlpack/latest/c_api.html).
struct Device {
  int32_t type;
  int32_t id;
};
struct ElementType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t rank;
  ElementType type;
  int64_t* shape;
  int64_t* strides;  // in elements; null for a compact row-major tensor
  uint64_t byte_offset;
};
struct ManagedTensor {
  static constexpr const char* kName = "dltensor";
  static constexpr const char* kUsedName = "used_dltensor";
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);

  bool known_version() const { return true; }
  bool read_only() const { return false; }
};
struct VersionedTensor {
  static constexpr const char* kName = "dltensor_versioned";
  static constexpr const char* kUsedName = "used_dltensor_versioned";
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(VersionedTensor*);
  uint64_t flags;
  Tensor tensor;

  bool known_version() const { return major == 1; }
  bool read_only() const { return (flags & 1) != 0; }
};

// The device of DLPack's number; memory that CUDA and ROCm pin is the CPU's. Throws InvalidArgument
// for one that this build lacks.
effinfer::Device device_of(int32_t type, int32_t id, const std::string& argument) {
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

py::array array_over(const Tensor& tensor, bool read_only, const py::capsule& owner,
                     const std::string& argument) {
  device_of(tensor.device.type, tensor.device.id, argument);
  const py::object type = numpy_type(tensor.type);
  if (!type) {
    throw InvalidArgument(argument + ": expected " + kKnownElements + ", got DLPack type " +
                          std::to_string(tensor.type.code) + " of " +
                          std::to_string(tensor.type.bits) + " bits");
  }
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
  const auto dtype = py::reinterpret_borrow<py::dtype>(type);
  if (empty || tensor.data == nullptr) return py::array(dtype, shape);
  py::array array(dtype, shape, strides, static_cast<std::byte*>(tensor.data) + tensor.byte_offset,
                  owner);
  if (read_only) array.attr("setflags")(py::arg("write") = false);
  return array;
}

template <class Managed>
py::array consume(const py::capsule& capsule, const std::string& argument) {
  const py::capsule owner = take<Managed>(capsule);
  const auto* managed = owner.get_pointer<Managed>();
  if (!managed->known_version()) {
    throw InvalidArgument(argument + ": expected DLPack 1.x, got another version");
  }
  return array_over(managed->tensor, managed->read_only(), owner, argument);
}

// Producers from before DLPack 1.0 take no version.
py::object export_capsule(const py::object& producer) {
  const py::object method = producer.attr("__dlpack__");
  try {
    return method(py::arg("max_version") = py::make_tuple(1, 0));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return method();
}

// The device is asked for before the export, in which it may copy or wait.
py::object checked_export(const py::object& producer, const std::string& argument) {
  try {
    if (py::hasattr(producer, "__dlpack_device__")) {
      const py::tuple device = producer.attr("__dlpack_device__")();
      device_of(device[0].cast<int32_t>(), device[1].cast<int32_t>(), argument);
    }
    return export_capsule(producer);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    throw InvalidArgument(argument + ": expected an array that can be shared, got: " +
                          std::string(py::str(error.value())));
  }
}

}  // namespace

py::array from_dlpack(const py::object& producer, const std::string& argument) {
  const py::object exported = checked_export(producer, argument);
  if (PyCapsule_IsValid(exported.ptr(), VersionedTensor::kName) != 0) {
    return consume<VersionedTensor>(py::reinterpret_borrow<py::capsule>(exported), argument);
  }
  if (PyCapsule_IsValid(exported.ptr(), ManagedTensor::kName) != 0) {
    return consume<ManagedTensor>(py::reinterpret_borrow<py::capsule>(exported), argument);
  }
  throw InvalidArgument(argument + ": expected a DLPack capsule of __dlpack__, got another object");
}

}  // namespace effinfer::bindings
