// Arrays of other libraries, through the DLPack protocol of the Python array API standard.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <string>

namespace effinfer::bindings {

// A numpy array over the memory of `producer`, which it keeps alive, or a DeviceArray over that of
// a GPU; bfloat16 and 8-bit floats come as the tagged integers of numpy_dtype(). Read-only where
// the producer says so. A GPU's contents are there for work in `stream`. Throws InvalidArgument,
// naming `argument` ("[rmsnorm] input"), for memory of another device, an element type that
// effinfer does not know, and when the producer refuses.
pybind11::object from_dlpack(const pybind11::object& producer, const std::string& argument,
                             uintptr_t stream);

}  // namespace effinfer::bindings
