// Arrays of other libraries, through the DLPack protocol of the Python array API standard.
#pragma once

#include <pybind11/numpy.h>

#include <string>

namespace effinfer::bindings {

// A numpy array over the memory of `producer`, which it keeps alive; bfloat16 and 8-bit floats come
// as the tagged integers of numpy_dtype(). Read-only where the producer says so. Throws
// InvalidArgument, naming `argument` ("[rmsnorm] input"), for memory outside the CPU's reach, an
// element type that effinfer does not know, and when the producer refuses.
pybind11::array from_dlpack(const pybind11::object& producer, const std::string& argument);

}  // namespace effinfer::bindings
