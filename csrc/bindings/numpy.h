// numpy arrays as tensors, and results as new arrays.
#pragma once

#include <pybind11/numpy.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/module.h"
#include "effinfer/error.h"
#include "effinfer/tensor.h"
#include "effinfer/threads.h"

namespace effinfer::bindings {

// A view of a C-contiguous array of float32, float16, int8, uint8, int32 or int64. Throws
// InvalidArgument otherwise, naming `argument` ("[rms_norm] x").
TensorView view_of(const py::array& array, std::string_view argument);

// The same for an argument that may be None: then the view has no data.
TensorView optional_view(const py::object& array, std::string_view argument);

// A new float32 array of that shape.
py::array_t<float> new_array(const Dims& dims);

// The pool that operators use when the caller gives none: made at first use, with
// default_threads(); a forked child makes its own.
ThreadPool& default_pool();
inline ThreadPool& pool_or_default(const std::shared_ptr<ThreadPool>& pool) {
  return pool ? *pool : default_pool();
}

}  // namespace effinfer::bindings
