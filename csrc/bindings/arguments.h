// The arguments of one operator, whose name errors begin with.
#pragma once

#include <pybind11/numpy.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "bindings/arrays.h"
#include "effinfer/error.h"

namespace effinfer::bindings {

class Arguments {
 public:
  using Object = pybind11::object;

  explicit Arguments(std::string op) : op_(std::move(op)) {}

  const std::string& op() const { return op_; }
  std::string label(const char* argument) const { return "[" + op_ + "] " + argument; }

  TensorView view(const pybind11::array& array, const char* argument) const {
    return view_of(array, label(argument));
  }
  TensorView view(const Object& array, const char* argument) const {
    return view_of(array, label(argument));
  }
  // Views without data for None.
  TensorView optional(const Object& array, const char* argument) const {
    return optional_view(array, label(argument));
  }
  StridedView strided(const Object& array, const char* argument) const {
    if (array.is_none()) return {};
    return strided_view_of(array, label(argument));
  }
  StridedView written(const Object& array, const char* argument) const {
    if (array.is_none()) return {};
    return writable_view_of(array, label(argument));
  }

  // The value whose name is `given`.
  template <class T>
  T named(const std::string& given, const char* argument,
          std::initializer_list<std::pair<const char*, T>> known) const {
    std::string names;
    for (const auto& [name, value] : known) {
      if (given == name) return value;
      names += (names.empty() ? "" : " or ") + std::string(name);
    }
    throw InvalidArgument(label(argument) + ": expected " + names + ", got " + given);
  }

 private:
  std::string op_;
};

}  // namespace effinfer::bindings
