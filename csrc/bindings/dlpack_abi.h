// The binary interface of DLPack 1.x (https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <cstdint>

namespace effinfer::bindings::dlpack {

inline constexpr int32_t kCpu = 1;
inline constexpr int32_t kCuda = 2;

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

}  // namespace effinfer::bindings::dlpack
