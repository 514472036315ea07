#include "bindings/device_array.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/dlpack_abi.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

using Shared = std::shared_ptr<DeviceArray>;

int64_t element_bytes(DType dtype) {
  return dtype_info(dtype).block_bytes;
}

std::array<int64_t, kMaxRank> compact_strides(const Dims& dims) {
  return StridedView::dense(nullptr, DType::f32, dims).strides;
}

Dims dims_of(const std::vector<int64_t>& shape, const char* argument) {
  Dims dims;
  for (const int64_t dim : shape) {
    if (dim < 0) throw InvalidArgument(std::string(argument) + ": expected no negative dimension");
    dims.push_back(dim);
  }
  return dims;
}

// Over memory that `owner` keeps alive, as torch's tensors are: strides in elements.
Shared over(uintptr_t pointer, const std::vector<int64_t>& shape,
            const std::optional<std::vector<int64_t>>& strides, const py::dtype& dtype,
            int32_t index, py::object owner, bool read_only, uintptr_t stream) {
  auto array = std::make_shared<DeviceArray>();
  StridedView& view = array->view;
  view.data = reinterpret_cast<void*>(pointer);  // NOLINT: what libraries give for a pointer
  view.dtype = dtype_of(dtype, "[DeviceArray] dtype");
  view.dims = dims_of(shape, "[DeviceArray] shape");
  view.device = {DeviceKind::cuda, index};
  check_device(view.device, "[DeviceArray] device");
  view.strides = compact_strides(view.dims);
  if (strides) {
    if (strides->size() != shape.size()) {
      throw InvalidArgument("[DeviceArray] strides: expected one for each dimension");
    }
    std::copy(strides->begin(), strides->end(), view.strides.begin());
  }
  array->owner = std::move(owner);
  array->read_only = read_only;
  array->stream = stream;
  return array;
}

// Another view of the same memory.
Shared derived(const DeviceArray& from, const Dims& dims,
               const std::array<int64_t, kMaxRank>& strides, int64_t offset) {
  auto array = std::make_shared<DeviceArray>(from);
  array->view.dims = dims;
  array->view.strides = strides;
  if (array->view.data != nullptr) {
    array->view.data =
        static_cast<std::byte*>(from.view.data) + offset * element_bytes(from.view.dtype);
  }
  return array;
}

[[noreturn]] void refuse_index(const std::string& got) {
  throw py::index_error("[DeviceArray] expected integers, slices, None and one ellipsis, got " +
                        got);
}

// What numpy calls basic indexing.
Shared item(const DeviceArray& array, const py::object& index) {
  const StridedView& view = array.view;
  const py::tuple parts =
      py::isinstance<py::tuple>(index) ? py::tuple(index) : py::make_tuple(index);
  int taken = 0;
  for (const py::handle part : parts) taken += part.is_none() || part.is(py::ellipsis()) ? 0 : 1;
  if (taken > view.dims.rank()) refuse_index("more of them than dimensions");
  Dims dims;
  std::array<int64_t, kMaxRank> strides{};
  int64_t offset = 0;
  int axis = 0;
  const auto keep = [&](int64_t dim, int64_t stride) {
    dims.push_back(dim);
    strides.at(static_cast<size_t>(dims.rank() - 1)) = stride;
  };
  for (const py::handle part : parts) {
    if (part.is_none()) {
      keep(1, 0);
    } else if (part.is(py::ellipsis())) {
      for (int left = view.dims.rank() - taken; left > 0; --left, ++axis) {
        keep(view.dims[axis], view.stride(axis));
      }
    } else if (py::isinstance<py::slice>(part)) {
      py::ssize_t start = 0, stop = 0, step = 0, length = 0;
      const auto slice = py::reinterpret_borrow<py::slice>(part);
      if (!slice.compute(view.dims[axis], &start, &stop, &step, &length)) {
        throw py::error_already_set();
      }
      offset += start * view.stride(axis);
      keep(length, step * view.stride(axis));
      ++axis;
    } else if (py::isinstance<py::int_>(part)) {
      const auto given = part.cast<int64_t>();
      const int64_t dim = view.dims[axis];
      const int64_t at = given < 0 ? given + dim : given;
      if (at < 0 || at >= dim) refuse_index(std::to_string(given));
      offset += at * view.stride(axis);
      ++axis;
    } else {
      refuse_index(std::string(py::str(py::type::of(part))));
    }
  }
  for (; axis < view.dims.rank(); ++axis) keep(view.dims[axis], view.stride(axis));
  return derived(array, dims, strides, offset);
}

// The same elements in other dimensions, where strides can say so.
Shared reshaped(const DeviceArray& array, const Dims& to) {
  const StridedView& view = array.view;
  const auto refuse = [&](const char* why) {
    throw InvalidArgument("[DeviceArray] reshape: expected " + std::string(why) + ", got " +
                          view.dims.to_string() + " as " + to.to_string());
  };
  if (to.num_elements() != view.dims.num_elements()) refuse("as many elements");
  if (to.num_elements() == 0 || array.is_contiguous()) {
    return derived(array, to, compact_strides(to), 0);
  }
  // Runs of old and of new dimensions with as many elements: the old ones must be dense within.
  std::array<int64_t, kMaxRank> strides{};
  int old_first = 0, new_first = 0;
  while (old_first < view.dims.rank() || new_first < to.rank()) {
    int old_end = old_first, new_end = new_first;
    int64_t old_size = 1, new_size = 1;
    do {
      const bool grow_old =
          new_end == to.rank() || (old_size <= new_size && old_end < view.dims.rank());
      if (grow_old && old_end < view.dims.rank()) {
        old_size *= view.dims[old_end++];
      } else {
        new_size *= to[new_end++];
      }
    } while (old_size != new_size);
    for (int axis = old_first; axis + 1 < old_end; ++axis) {
      if (view.stride(axis) != view.dims[axis + 1] * view.stride(axis + 1)) {
        refuse("dimensions that are dense");
      }
    }
    int64_t stride = old_end > old_first ? view.stride(old_end - 1) : 1;
    for (int axis = new_end - 1; axis >= new_first; --axis) {
      strides[static_cast<size_t>(axis)] = stride;
      stride *= to[axis];
    }
    old_first = old_end;
    new_first = new_end;
  }
  return derived(array, to, strides, 0);
}

Shared swapped(const DeviceArray& array, int first, int second) {
  const int rank = array.view.dims.rank();
  if (first < 0 || second < 0 || first >= rank || second >= rank) {
    throw InvalidArgument("[DeviceArray] swapaxes: expected axes from 0 to " +
                          std::to_string(rank - 1));
  }
  std::array<int64_t, kMaxRank> strides = array.view.strides;
  std::swap(strides[static_cast<size_t>(first)], strides[static_cast<size_t>(second)]);
  Dims dims;
  for (int axis = 0; axis < rank; ++axis) {
    dims.push_back(array.view.dims[axis == first ? second : axis == second ? first : axis]);
  }
  return derived(array, dims, strides, 0);
}

Shared from_numpy(const py::array& given, const std::string& device) {
  const auto array = py::reinterpret_borrow<py::array>(
      py::module_::import("numpy").attr("ascontiguousarray")(given));
  const TensorView view = view_of(array, "[DeviceArray.from_numpy] array");
  const StreamQueue queue(device, 0);
  Shared out = new_device_array(view.dims, view.dtype, queue);
  const size_t bytes = view.num_bytes();
  if (bytes == 0) return out;
  const py::gil_scoped_release release;
  queue.queue->upload(out->view.data, view.data, bytes);
  queue.queue->wait();
  return out;
}

// The memory from the lowest to the highest element comes as it lies.
py::array to_numpy(const DeviceArray& array) {
  const StridedView& view = array.view;
  const int64_t element = element_bytes(view.dtype);
  std::vector<py::ssize_t> shape = shape_vector(view.dims);
  if (view.dims.num_elements() == 0) return py::array(numpy_dtype(view.dtype), shape);
  int64_t low = 0, high = 0;
  std::vector<py::ssize_t> strides;
  for (int axis = 0; axis < view.dims.rank(); ++axis) {
    const int64_t reach = (view.dims[axis] - 1) * view.stride(axis);
    (reach < 0 ? low : high) += reach;
    strides.push_back(view.stride(axis) * element);
  }
  py::array_t<uint8_t> bytes((high - low + 1) * element);
  uint8_t* to = bytes.mutable_data();
  {
    const StreamQueue queue(name(view.device), array.stream);
    const py::gil_scoped_release release;
    queue.queue->download(to, static_cast<const std::byte*>(view.data) + low * element,
                          static_cast<size_t>((high - low + 1) * element));
    queue.queue->wait();
  }
  const py::array window(numpy_dtype(view.dtype), shape, strides, to - low * element, bytes);
  return py::reinterpret_borrow<py::array>(window.attr("copy")());
}

dlpack::ElementType element_type(DType dtype) {
  const auto bits = static_cast<uint8_t>(element_bytes(dtype) * 8);
  switch (dtype) {
    case DType::i8:
    case DType::i32:
    case DType::i64:
      return {0, bits, 1};
    case DType::u8:
      return {1, bits, 1};
    case DType::bf16:
      return {4, bits, 1};
    case DType::f8_e4m3:
      return {10, bits, 1};
    case DType::f8_e5m2:
      return {12, bits, 1};
    default:
      return {2, bits, 1};
  }
}

// What an exported capsule keeps.
template <class Managed>
struct Export {
  Managed managed{};
  Shared array;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};
};

template <class Managed>
py::capsule exported(const Shared& array) {
  auto out = std::make_unique<Export<Managed>>();
  const StridedView& view = array->view;
  out->array = array;
  out->strides = view.strides;
  for (int axis = 0; axis < view.dims.rank(); ++axis) {
    out->shape[static_cast<size_t>(axis)] = view.dims[axis];
  }
  out->managed.tensor = {view.data,
                         {dlpack::kCuda, view.device.index},
                         view.dims.rank(),
                         element_type(view.dtype),
                         out->shape.data(),
                         out->strides.data(),
                         0};
  out->managed.context = out.get();
  out->managed.deleter = [](Managed* managed) {
    // What it owns may be Python's.
    const py::gil_scoped_acquire acquire;
    delete static_cast<Export<Managed>*>(managed->context);
  };
  if constexpr (requires { out->managed.flags; }) {
    out->managed.major = 1;
    out->managed.flags = array->read_only ? 1 : 0;
  }
  const py::capsule capsule(&out->managed, Managed::kName, [](PyObject* object) {
    // Whoever takes a capsule's tensor renames it and calls the deleter himself.
    if (PyCapsule_IsValid(object, Managed::kName) == 0) return;
    auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(object, Managed::kName));
    managed->deleter(managed);
  });
  out.release();
  return capsule;
}

// The consumer's stream runs behind the one in whose order the contents were put.
void order_streams(const DeviceArray& array, const std::optional<int64_t>& stream) {
  if (stream == -1) return;
  const auto consumer = static_cast<uintptr_t>(stream.value_or(0));
  const auto named = [](uintptr_t handle) { return handle == 0 ? 1 : handle; };
  if (named(consumer) == named(array.stream)) return;
  const StreamQueue before(name(array.view.device), array.stream);
  const StreamQueue behind(name(array.view.device), consumer);
  behind.queue->follow(*before.queue);
}

py::capsule to_dlpack(const Shared& array, const std::optional<int64_t>& stream,
                      const std::optional<std::pair<int, int>>& max_version,
                      const py::object& dl_device, const std::optional<bool>& copy) {
  const py::tuple own = py::make_tuple(dlpack::kCuda, array->view.device.index);
  if (!dl_device.is_none() && !dl_device.equal(own)) {
    throw py::buffer_error("DeviceArray: it does not move to another device; to_numpy() copies it");
  }
  if (copy.value_or(false)) throw py::buffer_error("DeviceArray: exports no copies");
  order_streams(*array, stream);
  const bool versioned = max_version && max_version->first >= 1;
  if (versioned) return exported<dlpack::VersionedTensor>(array);
  if (array->read_only) {
    throw py::buffer_error("DeviceArray: it is read-only, which DLPack says from version 1 on");
  }
  return exported<dlpack::ManagedTensor>(array);
}

py::tuple byte_strides(const DeviceArray& array) {
  py::tuple strides(static_cast<size_t>(array.view.dims.rank()));
  for (int axis = 0; axis < array.view.dims.rank(); ++axis) {
    strides[static_cast<size_t>(axis)] = array.view.stride(axis) * element_bytes(array.view.dtype);
  }
  return strides;
}

// Version 3 of https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, which knows
// numpy's own types only.
py::dict cuda_array_interface(const DeviceArray& array) {
  const py::dtype dtype = numpy_dtype(array.view.dtype);
  if (!dtype.attr("metadata").is_none()) {
    throw py::attribute_error("__cuda_array_interface__: numpy has no type for " +
                              std::string(name(array.view.dtype)));
  }
  py::dict out;
  out["shape"] = shape_tuple(array.view.dims);
  out["typestr"] = dtype.attr("str");
  out["data"] = py::make_tuple(reinterpret_cast<uintptr_t>(array.view.data), array.read_only);
  out["strides"] = byte_strides(array);
  out["stream"] = array.stream == 0 ? uintptr_t{1} : array.stream;
  out["version"] = 3;
  return out;
}

}  // namespace

StreamQueue::StreamQueue(const std::string& device, uintptr_t handle)
    : stream(handle),
      queue(wrap_stream(parse_device(device, "[Queue] device"), reinterpret_cast<void*>(handle))) {
}  // NOLINT: a stream's handle

bool DeviceArray::is_contiguous() const {
  if (view.dims.num_elements() == 0) return true;
  int64_t stride = 1;
  for (int axis = view.dims.rank() - 1; axis >= 0; --axis) {
    if (view.dims[axis] != 1 && view.stride(axis) != stride) return false;
    stride *= view.dims[axis];
  }
  return true;
}

std::shared_ptr<DeviceArray> new_device_array(const Dims& dims, DType dtype,
                                              const StreamQueue& queue) {
  auto array = std::make_shared<DeviceArray>();
  const Device device = queue.queue->device();
  const int64_t bytes = dims.num_elements() * element_bytes(dtype);
  array->memory = allocate_memory(device, static_cast<size_t>(bytes));
  array->view = StridedView::dense(array->memory.get(), dtype, dims);
  array->view.device = device;
  array->stream = queue.stream;
  return array;
}

Result float32_result(const Dims& dims, const Where& where, const py::object& out,
                      const std::string& argument) {
  const Device device = executor_of(where).device();
  if (out.is_none()) {
    if (device != Device{}) {
      throw InvalidArgument(argument + ": expected an array on " + name(device) + ", got None");
    }
    py::array_t<float> array = new_array(dims);
    float* data = array.mutable_data();
    return {std::move(array), data};
  }
  const StridedView view = writable_view_of(out, argument);
  const TensorView found = view_of(out, argument);  // dense
  if (view.dims == dims && view.dtype == DType::f32 && view.device == device) {
    return {out, static_cast<float*>(view.data)};
  }
  throw InvalidArgument(argument + ": expected f32 " + dims.to_string() + " on " + name(device) +
                        ", got " + std::string(name(found.dtype)) + " " + found.dims.to_string() +
                        " on " + name(found.device));
}

namespace {

void upload(const StreamQueue& queue, const DeviceArray& array, const py::array& values) {
  const TensorView from = view_of(values, "[Queue.upload] values");
  const bool same = from.dims == array.view.dims && from.dtype == array.view.dtype;
  if (!same || !array.is_contiguous() || array.read_only) {
    throw InvalidArgument(
        "[Queue.upload] array: expected a writable C-contiguous array of the shape and dtype of "
        "values");
  }
  if (from.num_bytes() > 0) queue.queue->upload(array.view.data, from.data, from.num_bytes());
}

void zero(const StreamQueue& queue, const DeviceArray& array) {
  if (!array.is_contiguous() || array.read_only) {
    throw InvalidArgument("[Queue.zero] array: expected a writable C-contiguous array");
  }
  const auto bytes =
      static_cast<size_t>(array.view.dims.num_elements() * element_bytes(array.view.dtype));
  if (bytes > 0) queue.queue->zero(array.view.data, bytes);
}

void register_queue(py::class_<StreamQueue, std::shared_ptr<StreamQueue>>& queues) {
  queues
      .def(py::init<const std::string&, uintptr_t>(), py::arg("device") = "cuda",
           py::arg("stream") = 0,
           "`stream`: a cudaStream_t as a number; 0 is the legacy default stream.")
      .def(
          "synchronize",
          [](const StreamQueue& queue) {
            const py::gil_scoped_release release;
            queue.queue->wait();
          },
          "Waits for all that the stream has.")
      .def_readonly("stream", &StreamQueue::stream)
      .def_property_readonly("device",
                             [](const StreamQueue& queue) { return name(queue.queue->device()); })
      .def("upload", &upload, py::arg("array"), py::arg("values"),
           "Writes values of the host to an array.")
      .def("zero", &zero, py::arg("array"), "Writes zeros to an array of the device.");
}

}  // namespace

void register_device_array(py::module_& m) {
  py::class_<StreamQueue, std::shared_ptr<StreamQueue>> queues(
      m, "Queue", "What operators on a GPU run in: a stream that somebody else has made.");
  py::class_<DeviceArray, Shared>(m, "DeviceArray", "An array in the memory of a GPU.")
      .def(py::init(&over), py::arg("pointer"), py::arg("shape"), py::arg("strides"),
           py::arg("dtype"), py::arg("index"), py::arg("owner"), py::arg("read_only") = false,
           py::arg("stream") = 0,
           "Over memory of \"cuda:<index>\" that `owner` keeps alive; strides in elements.")
      .def_static(
          "empty",
          [](const std::vector<int64_t>& shape, const py::dtype& dtype, const StreamQueue& queue) {
            return new_device_array(dims_of(shape, "[DeviceArray.empty] shape"),
                                    dtype_of(dtype, "[DeviceArray.empty] dtype"), queue);
          },
          py::arg("shape"), py::arg("dtype"), py::arg("queue"))
      .def_static("from_numpy", &from_numpy, py::arg("array"), py::arg("device") = "cuda",
                  "A copy in the memory of a GPU.")
      .def("to_numpy", &to_numpy, "A copy, once the array's stream has done all that it has to.")
      .def(
          "reshape",
          [](const DeviceArray& array, const std::vector<int64_t>& shape) {
            return reshaped(array, dims_of(shape, "[DeviceArray] reshape"));
          },
          py::arg("shape"), "Over the same memory.")
      .def("swapaxes", &swapped, py::arg("first"), py::arg("second"))
      .def("__getitem__", &item, py::arg("index"))
      .def("__dlpack__", &to_dlpack, py::kw_only(), py::arg("stream") = py::none(),
           py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(),
           py::arg("copy") = py::none())
      .def("__dlpack_device__",
           [](const DeviceArray& array) {
             return py::make_tuple(dlpack::kCuda, array.view.device.index);
           })
      .def_property_readonly("__cuda_array_interface__", &cuda_array_interface)
      .def_property_readonly("device",
                             [](const DeviceArray& array) { return name(array.view.device); })
      .def_property_readonly("shape",
                             [](const DeviceArray& array) { return shape_tuple(array.view.dims); })
      .def_property_readonly("ndim",
                             [](const DeviceArray& array) { return array.view.dims.rank(); })
      .def_property_readonly(
          "size", [](const DeviceArray& array) { return array.view.dims.num_elements(); })
      .def_property_readonly(
          "itemsize", [](const DeviceArray& array) { return element_bytes(array.view.dtype); })
      .def_property_readonly("strides", &byte_strides, "In bytes, as numpy's.")
      .def_property_readonly("dtype",
                             [](const DeviceArray& array) { return numpy_dtype(array.view.dtype); })
      .def_readonly("stream", &DeviceArray::stream)
      .def_readonly("read_only", &DeviceArray::read_only)
      .def_property_readonly("is_contiguous", &DeviceArray::is_contiguous);
  register_queue(queues);
}

}  // namespace effinfer::bindings
