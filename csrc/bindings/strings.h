// Text between Python and the core. File contents need not be UTF-8: undecodable bytes become lone
// surrogates ("surrogateescape", as in os.fsdecode) and come back as the same bytes.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

namespace effinfer::bindings {

inline pybind11::str to_python(std::string_view text) {
  PyObject* result =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
  if (result == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(result);
}

// Encodes a str; bytes stay as they are.
inline std::string to_bytes(const pybind11::object& text) {
  if (pybind11::isinstance<pybind11::bytes>(text)) return text.cast<std::string>();
  if (!pybind11::isinstance<pybind11::str>(text)) {
    throw pybind11::type_error("expected str or bytes");
  }
  PyObject* encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogateescape");
  if (encoded == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::bytes>(encoded);
}

// Spells a str, bytes or os.PathLike as the file system does.
inline std::string to_path(const pybind11::object& path) {
  PyObject* encoded = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::bytes>(encoded);
}

}  // namespace effinfer::bindings
