// As fiber.cpp, never built with -fsanitize=thread.
#include "gpu/host_tensor_map.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "effinfer/error.h"
#include "gpu/swizzle.h"

namespace effinfer::cuda {

// What cuTensorMapEncodeTiled refuses is refused.
TensorMap tensor_map(const TileSource& source, Queue&) {
  const auto require = [](bool condition, const char* message) {
    if (!condition) throw DeviceError(std::string("[emulator] tensor_map: ") + message);
  };
  require(reinterpret_cast<uintptr_t>(source.data) % 16 == 0, "expected data at multiples of 16");
  require(source.row_bytes % 16 == 0 && source.row_bytes >= source.cols * 2,
          "expected rows at multiples of 16 bytes");
  require(source.rows > 0 && source.cols > 0, "expected a matrix that is not empty");
  require(source.box_rows > 0 && source.box_rows <= 256, "expected 1 to 256 rows");
  const auto bytes = static_cast<size_t>(source.box_cols) * 2;
  require(source.box_cols > 0 && source.box_cols <= 256 && bytes % 16 == 0,
          "expected multiples of 8 columns, up to 256");
  require(source.swizzle == Swizzle::none || bytes <= host::swizzled_row_bytes(source.swizzle),
          "expected as many columns as a swizzled row has");
  const host::HostTensorMap inside{host::HostTensorMap::kMark, source};
  TensorMap out = {};
  static_assert(sizeof inside <= sizeof out);
  std::memcpy(&out, &inside, sizeof inside);
  return out;
}

namespace host {

HostTensorMap decoded(const TensorMap& map) {
  HostTensorMap out;
  std::memcpy(static_cast<void*>(&out), &map, sizeof out);
  if (out.mark != HostTensorMap::kMark) {
    throw std::logic_error("copy_tile: expected what tensor_map() made");
  }
  return out;
}

}  // namespace host

}  // namespace effinfer::cuda
