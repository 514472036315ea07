// Typed exceptions. Messages start with the operator or component in brackets and name the
// argument, what was expected and what was given: "[rms_norm] weight: expected shape [576], got
// [512]". The library never aborts.
#pragma once

#include <stdexcept>
#include <string>

#include "effinfer/export.h"

namespace effinfer {

// The base of everything that effinfer throws.
class EFFINFER_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A caller's mistake: wrong shape, dtype, option or value.
class EFFINFER_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A file that is missing or cannot be read or written.
class EFFINFER_API FileError : public Error {
 public:
  using Error::Error;
};

// A file or a text whose content breaks its format: truncated, oversized, inconsistent.
class EFFINFER_API FormatError : public Error {
 public:
  using Error::Error;
};

// Valid input that this build or this machine has no kernel for.
class EFFINFER_API Unsupported : public Error {
 public:
  using Error::Error;
};

// Host or device memory, or the KV page pool, is exhausted.
class EFFINFER_API OutOfMemory : public Error {
 public:
  using Error::Error;
};

// A device failed, or the driver that it needs: the message names the kernel or the call.
class EFFINFER_API DeviceError : public Error {
 public:
  using Error::Error;
};

// The work was stopped by a progress callback or by cancel().
class EFFINFER_API Cancelled : public Error {
 public:
  using Error::Error;
};

// A broken invariant inside effinfer: a bug to report, never the caller's fault.
class EFFINFER_API InternalError : public Error {
 public:
  using Error::Error;
};

}  // namespace effinfer
