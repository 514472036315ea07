// GGUF files. Metadata strings and names that are not UTF-8 come as str with surrogate escapes
// (bindings/strings.h); string_bytes() gives the raw bytes.
#include "effinfer/gguf.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "bindings/arrays.h"
#include "bindings/module.h"
#include "bindings/strings.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

using File = std::shared_ptr<GgufFile>;

// A string array of the metadata, decoded item by item.
struct Strings {
  File file;
  const GgufArray* array;

  py::str item(py::ssize_t index) const {
    const auto size = static_cast<py::ssize_t>(array->size);
    if (index < 0) index += size;
    if (index < 0 || index >= size) throw py::index_error("string index out of range");
    return to_python(array->string(static_cast<uint64_t>(index)));
  }
};

// A tensor's description; its name is a view into the file.
struct Tensor {
  File file;
  const GgufTensor* info;
};

constexpr std::array<const char*, 12> kElementNames = {
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "u64", "i64", "f64"};
constexpr std::array<const char*, 12> kNumpyNames = {"u1",  "i1", "<u2", "<i2", "<u4", "<i4",
                                                     "<f4", "?",  "",    "<u8", "<i8", "<f8"};

const GgufValue& value_of(const GgufFile& file, const py::object& key) {
  const GgufValue* value = file.find(to_bytes(key));
  if (value == nullptr) throw py::key_error(py::repr(key).cast<std::string>());
  return *value;
}

const GgufArray& array_of(const GgufFile& file, const py::object& key) {
  const auto* array = std::get_if<GgufArray>(&value_of(file, key));
  if (array == nullptr) {
    throw InvalidArgument("[gguf] key: expected an array, got " +
                          py::repr(key).cast<std::string>() + " of another type");
  }
  return *array;
}

const GgufArray& string_array_of(const GgufFile& file, const py::object& key) {
  const GgufArray& array = array_of(file, key);
  if (array.type != GgufArray::Type::string) {
    throw InvalidArgument("[gguf] key: expected an array of strings, got " +
                          py::repr(key).cast<std::string>() + " of numbers");
  }
  return array;
}

template <class Convert>
py::list list_of(const GgufArray& array, Convert&& convert) {
  py::list list(array.size);
  size_t i = 0;
  array.for_each_string([&](std::string_view text) { list[i++] = convert(text); });
  return list;
}

// Zero-copy where the file has it aligned, a copy elsewhere; read-only both ways.
py::array number_array(const File& file, const GgufArray& array) {
  const py::dtype dtype(std::string(kNumpyNames[static_cast<size_t>(array.type)]));
  const auto size = static_cast<py::ssize_t>(array.size);
  const auto address = reinterpret_cast<uintptr_t>(array.bytes.data());
  if (address % static_cast<uintptr_t>(dtype.itemsize()) == 0) {
    return read_only_view(dtype, size, array.bytes.data(), py::cast(file));
  }
  py::array copy(dtype, std::vector<py::ssize_t>{size});
  std::memcpy(copy.mutable_data(), array.bytes.data(), array.bytes.size());
  copy.attr("setflags")(py::arg("write") = false);
  return copy;
}

// Element `index` of an array of numbers: exact but for integers of more than 53 bits.
double number_at(const GgufArray& array, uint64_t index) {
  using Type = GgufArray::Type;
  const auto read = [&]<class T>(T value) {
    std::memcpy(&value, array.bytes.data() + index * sizeof(T), sizeof(T));
    return static_cast<double>(value);
  };
  switch (array.type) {
    case Type::u8:
    case Type::boolean:
      return read(uint8_t{});
    case Type::i8:
      return read(int8_t{});
    case Type::u16:
      return read(uint16_t{});
    case Type::i16:
      return read(int16_t{});
    case Type::u32:
      return read(uint32_t{});
    case Type::i32:
      return read(int32_t{});
    case Type::f32:
      return read(float{});
    case Type::u64:
      return read(uint64_t{});
    case Type::i64:
      return read(int64_t{});
    case Type::f64:
      return read(double{});
    case Type::string:
      break;
  }
  throw InvalidArgument("[gguf] numbers: expected an array of numbers, got one of strings");
}

// A vocabulary has few tokens of a kind: neither numpy nor all its strings are needed for them.
std::map<uint64_t, py::str> strings_where(const GgufFile& file, const py::object& key,
                                          const py::object& numbers, double value) {
  const GgufArray& strings = string_array_of(file, key);
  const GgufArray& kinds = array_of(file, numbers);
  std::map<uint64_t, py::str> found;
  for (uint64_t i = 0; i < std::min(strings.size, kinds.size); ++i) {
    if (number_at(kinds, i) == value) found.emplace(i, to_python(strings.string(i)));
  }
  return found;
}

py::object to_object(const File& file, const GgufValue& value, bool lazy_strings) {
  return std::visit(
      [&](const auto& held) -> py::object {
        using Held = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<Held, std::string_view>) {
          return to_python(held);
        } else if constexpr (std::is_same_v<Held, GgufArray>) {
          if (held.type != GgufArray::Type::string) return number_array(file, held);
          if (lazy_strings) return py::cast(Strings{file, &held});
          return list_of(held, to_python);
        } else {
          return py::cast(held);
        }
      },
      value);
}

std::string value_type(const GgufFile& file, const py::object& key) {
  return std::visit(
      [](const auto& held) -> std::string {
        using Held = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<Held, GgufArray>) {
          return "array[" + std::string(kElementNames[static_cast<size_t>(held.type)]) + "]";
        } else if constexpr (std::is_same_v<Held, std::string_view>) {
          return "string";
        } else if constexpr (std::is_same_v<Held, bool>) {
          return "bool";
        } else {
          return std::is_same_v<Held, double> ? "float" : "int";
        }
      },
      value_of(file, key));
}

const GgufTensor& tensor_of(const GgufFile& file, const py::object& name) {
  const GgufTensor* tensor = file.find_tensor(to_bytes(name));
  if (tensor == nullptr) file.weight(to_bytes(name));  // throws, naming file and tensor
  return *tensor;
}

py::array tensor_bytes(const File& file, const py::object& name) {
  const GgufTensor& tensor = tensor_of(*file, name);
  if (tensor.num_bytes == 0 && !tensor.dtype) file->weight(tensor.name);  // throws: unknown size
  return read_only_view(py::dtype::of<uint8_t>(), static_cast<py::ssize_t>(tensor.num_bytes),
                        tensor.data, py::cast(file));
}

py::array_t<float> dequantize_array(const std::string& dtype, const py::array& blocks,
                                    const std::vector<int64_t>& shape) {
  return dequantized(view_of(blocks, dtype, shape, "[dequantize]"));
}

void register_parts(py::module_& m) {
  py::class_<Strings>(m, "GgufStrings", "A sequence of str over a metadata array.")
      .def("__len__", [](const Strings& self) { return self.array->size; })
      .def("__getitem__", &Strings::item);
  py::class_<Tensor>(m, "GgufTensor", "What a file says of a tensor.")
      .def_property_readonly("name", [](const Tensor& self) { return to_python(self.info->name); })
      .def_property_readonly("shape",
                             [](const Tensor& self) { return shape_tuple(self.info->dims); })
      .def_property_readonly("type_name", [](const Tensor& self) { return self.info->type_name; })
      .def_property_readonly("num_bytes", [](const Tensor& self) { return self.info->num_bytes; })
      .def_property_readonly(
          "dtype",
          [](const Tensor& self) -> py::object {
            if (!self.info->dtype) return py::none();
            return to_python(name(*self.info->dtype));
          },
          "Name of the dtype, or None when effinfer does not read this type.");
}

void register_metadata(py::class_<GgufFile, WeightSource, File>& file) {
  file.def(
          "keys",
          [](const GgufFile& self) {
            py::list keys;
            for (const auto& [key, value] : self.metadata()) keys.append(to_python(key));
            return keys;
          },
          "Metadata keys in file order.")
      .def(
          "metadata",
          [](const File& self) {
            py::dict result;
            for (const auto& [key, value] : self->metadata()) {
              result[to_python(key)] = to_object(self, value, true);
            }
            return result;
          },
          "All metadata as a dict; string arrays are GgufStrings, decoded when indexed.")
      .def(
          "get",
          [](const File& self, const py::object& key, const py::object& fallback) {
            const GgufValue* value = self->find(to_bytes(key));
            return value == nullptr ? fallback : to_object(self, *value, false);
          },
          py::arg("key"), py::arg("default") = py::none(),
          "A metadata value: int, float, bool, str, list of str, or a read-only numpy array "
          "(without a copy where the file has it aligned). `default` when absent.")
      .def("value_type", &value_type, py::arg("key"),
           "\"int\", \"float\", \"bool\", \"string\" or \"array[u32]\" and the like. KeyError when "
           "absent.")
      .def(
          "array_size",
          [](const GgufFile& self, const py::object& key) { return array_of(self, key).size; },
          py::arg("key"), "Number of elements of an array.")
      .def(
          "strings",
          [](const GgufFile& self, const py::object& key) {
            return list_of(string_array_of(self, key), to_python);
          },
          py::arg("key"),
          "A string array as list of str; bytes that are not UTF-8 become surrogate escapes.")
      .def(
          "string_bytes",
          [](const GgufFile& self, const py::object& key) {
            return list_of(string_array_of(self, key), [](std::string_view text) {
              return py::bytes(text.data(), text.size());
            });
          },
          py::arg("key"), "A string array as list of bytes.")
      .def("strings_where", &strings_where, py::arg("key"), py::arg("numbers"), py::arg("value"),
           "Index -> str: of a string array, those where the array `numbers` holds `value`.");
}

}  // namespace

void register_gguf(py::module_& m) {
  register_parts(m);
  py::class_<GgufFile, WeightSource, File> file(
      m, "GgufFile", "A memory-mapped GGUF file. FileError, FormatError.");
  file.def(py::init([](const py::object& path) {
             const std::string name = to_path(path);
             const py::gil_scoped_release release;
             return GgufFile::open(name);
           }),
           py::arg("path"))
      .def_property_readonly("version", &GgufFile::version)
      .def_property_readonly("alignment", &GgufFile::alignment)
      .def_property_readonly("path", [](const GgufFile& self) { return to_python(self.path()); })
      .def_property_readonly("file_bytes", &GgufFile::file_bytes)
      .def(
          "tensors",
          [](const File& self) {
            py::list list;
            for (const GgufTensor& tensor : self->tensors()) list.append(Tensor{self, &tensor});
            return list;
          },
          "Descriptions of all tensors in file order.")
      .def("tensor_bytes", &tensor_bytes, py::arg("name"),
           "A tensor's bytes: a read-only uint8 array over the mapping.");
  register_metadata(file);

  m.def("dequantize", &dequantize_array, py::arg("dtype"), py::arg("blocks"), py::arg("shape"),
        "Decodes the bytes of a tensor of `shape` (elements) to float32, bit-equal to the gguf "
        "package.");
  m.def(
      "write_gguf_with_metadata",
      [](const File& source, const py::object& key, const py::object& value,
         const py::object& path) {
        const std::string key_bytes = to_bytes(key);
        const std::string value_bytes = to_bytes(value);
        const std::string target = to_path(path);
        const py::gil_scoped_release release;
        write_gguf_with_metadata(*source, key_bytes, value_bytes, target);
      },
      py::arg("source"), py::arg("key"), py::arg("value"), py::arg("path"),
      "Writes a copy of `source` with string metadata `key` added or replaced, complete or not at "
      "all.");
}

}  // namespace effinfer::bindings
