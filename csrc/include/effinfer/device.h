// Devices, what this machine can do, and what effinfer will use of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "effinfer/export.h"

namespace effinfer {

// Where memory lies and kernels run. Tables of kernels are op x device x level.
enum class DeviceKind : uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int32_t index = 0;  // among those of the kind
  bool operator==(const Device&) const = default;
};

// Those that this build can use on this machine; the CPU is the first.
EFFINFER_API std::vector<Device> available_devices();
EFFINFER_API std::string name(Device device);  // "cpu", "cuda:0"
// "cuda" is the first of its kind, and "auto" the last device of available_devices(): a GPU where
// there is one. Each throws InvalidArgument, about `argument`, with the devices that there are.
EFFINFER_API Device parse_device(std::string_view text, std::string_view argument = "[device]");
EFFINFER_API void check_device(Device device, std::string_view argument);

// Instruction-set levels, each including the ones before it. `avx512` needs F, BW, DQ, VL and VNNI;
// `amx` also needs AMX-TILE, INT8, BF16, AVX512-BF16 and the kernel's permission to use the tiles.
enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, amx = 3 };

struct CpuFeatures {
  Isa best = Isa::portable;  // highest level that the CPU and the operating system support
  bool avx512_bf16 = false;  // VDPBF16PS, a sub-feature of `avx512`
  // Whether that multiplies more numbers a cycle than float32 FMA does. It is known by the CPU's
  // maker and never measured: what follows from it changes bits.
  bool fast_bf16 = false;
  std::string model_name;  // as the CPU reports it; may be empty
  // Maker, family, model, stepping and the kilobytes of the second and the last cache:
  // "AuthenticAMD-26-2-1-1024K-32768K"; what is measured once a machine is kept under it.
  std::string signature;
};

// Detected once per process.
EFFINFER_API const CpuFeatures& cpu_features();

// Which products of bfloat16 are chosen at a level of a CPU, and why not more: "vectors", "tiles;
// vectors multiply float32, which is faster on this CPU", ...
EFFINFER_API std::string describe_bf16(Isa isa, const CpuFeatures& features = cpu_features());

// The level in use: the best one, lowered by EFFINFER_ISA or set_isa(). A level that the machine
// lacks is an Unsupported error, never a crash later.
EFFINFER_API Isa current_isa();
EFFINFER_API void set_isa(Isa isa);
// Levels that this machine can run, lowest first.
EFFINFER_API std::vector<Isa> available_isas();
EFFINFER_API std::string_view name(Isa isa);
EFFINFER_API Isa parse_isa(std::string_view text);

// What kernels are selected for.
struct Target {
  Device device = {};
  Isa isa = Isa::portable;   // the highest level that may be used, of the CPU
  int32_t arch = 0;          // of a GPU: its compute capability times ten, 80 is Ampere
  int64_t shared_bytes = 0;  // of a GPU: what the threads of a block may share
  int64_t l2_bytes = 0;      // of a GPU: its second cache
};
// With current_isa().
EFFINFER_API Target current_target(Device device = {});

// Why current_isa() is what it is: "best of this CPU", "EFFINFER_ISA=avx2", "set_isa()".
EFFINFER_API std::string isa_reason();

// How many threads to use when nobody says: min(affinity mask, floor(cgroup CPU quota), CPUs), or
// EFFINFER_THREADS where that is less. Read anew at each call.
struct ThreadChoice {
  int threads = 1;
  bool quota_limited = false;  // a cgroup quota is in force: the pool does not spin
  std::string reason;
};
EFFINFER_API ThreadChoice default_threads();
// The threads for a wanted number (<= 0: nobody says), at most as many as there are CPUs to run
// them: members beyond that only wait for each other.
EFFINFER_API ThreadChoice usable_threads(int wanted);

// What the system says of memory; read once per process.
struct MemoryFeatures {
  // Transparent huge pages: "always", "madvise" (those who ask get them: packed weights and the
  // arena do), "never", or "unavailable".
  std::string huge_pages;
  int numa_nodes = 1;  // that are online
};
EFFINFER_API const MemoryFeatures& memory_features();

}  // namespace effinfer
