// Token ids as Python passes them: a list, a tuple or an integer array.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "effinfer/error.h"

namespace effinfer::bindings {

// A list of plain ints needs no numpy. False: it is something else, or has ids that do not fit.
inline bool plain_tokens(const pybind11::object& object, std::vector<int32_t>& tokens) {
  if (!PyList_CheckExact(object.ptr())) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object.ptr()); ++i) {
    PyObject* item = PyList_GET_ITEM(object.ptr(), i);
    if (!PyLong_CheckExact(item)) return false;
    int overflow = 0;
    const long long token = PyLong_AsLongLongAndOverflow(item, &overflow);
    const bool fits = token >= std::numeric_limits<int32_t>::min() &&
                      token <= std::numeric_limits<int32_t>::max();
    if (overflow != 0 || !fits) return false;
    tokens.push_back(static_cast<int32_t>(token));
  }
  return true;
}

// Throws InvalidArgument naming `argument`: more than one dimension, not integers, out of int32.
inline std::vector<int32_t> to_tokens(const pybind11::object& object, const char* argument) {
  namespace py = pybind11;
  const std::string label = std::string("[tokens] ") + argument + ": expected ";
  if (std::vector<int32_t> tokens; plain_tokens(object, tokens)) return tokens;
  const py::array any = py::array::ensure(object);
  if (!any || any.ndim() != 1) {
    PyErr_Clear();
    throw InvalidArgument(label + "a sequence of integers");
  }
  if (any.size() == 0) return {};
  const char kind = any.dtype().kind();
  if (kind != 'i' && kind != 'u') {
    throw InvalidArgument(label + "integers, got dtype " + std::string(py::str(any.dtype())));
  }
  const auto wide = py::array_t<int64_t, py::array::c_style | py::array::forcecast>::ensure(any);
  std::vector<int32_t> tokens(static_cast<size_t>(wide.size()));
  for (py::ssize_t i = 0; i < wide.size(); ++i) {
    const int64_t token = wide.data()[i];
    if (token < std::numeric_limits<int32_t>::min() ||
        token > std::numeric_limits<int32_t>::max()) {
      throw InvalidArgument(label + "32-bit ids, got " + std::to_string(token));
    }
    tokens[static_cast<size_t>(i)] = static_cast<int32_t>(token);
  }
  return tokens;
}

}  // namespace effinfer::bindings
