#include "effinfer/device.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <mutex>

#include "core/backend.h"
#include "core/cpu_detection.h"
#include "core/env.h"
#include "effinfer/error.h"
#include "effinfer/version.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

namespace effinfer {
namespace {

constexpr std::array<std::string_view, 4> kIsaNames = {"portable", "avx2", "avx512", "amx"};

#if defined(__x86_64__)

using core::CpuidRegisters;

CpuidRegisters cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  CpuidRegisters r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// XCR0. Needs OSXSAVE.
uint64_t enabled_states() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

// arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
bool request_tiles() {
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

std::string brand_string() {
  if (cpuid(0x80000000u).eax < 0x80000004u) return "";
  std::string text;
  for (uint32_t leaf = 0x80000002u; leaf <= 0x80000004u; ++leaf) {
    const CpuidRegisters r = cpuid(leaf);
    for (const uint32_t word : {r.eax, r.ebx, r.ecx, r.edx}) {
      std::array<char, 4> bytes;
      std::memcpy(bytes.data(), &word, 4);
      for (const char c : bytes) {
        if (c != '\0') text += c;
      }
    }
  }
  const size_t last = text.find_last_not_of(' ');
  return last == std::string::npos ? "" : text.substr(0, last + 1);
}

// Family and model as the manuals number them.
std::string signature(const CpuidRegisters& leaf1) {
  const CpuidRegisters leaf0 = cpuid(0);
  std::array<char, 12> maker;
  std::memcpy(maker.data(), &leaf0.ebx, 4);
  std::memcpy(maker.data() + 4, &leaf0.edx, 4);
  std::memcpy(maker.data() + 8, &leaf0.ecx, 4);
  const uint32_t base = leaf1.eax >> 8 & 15;
  const uint32_t family = base == 15 ? base + (leaf1.eax >> 20 & 255) : base;
  const uint32_t model = (leaf1.eax >> 4 & 15) | (leaf1.eax >> 16 & 15) << 4;
  std::string text(maker.data(), maker.size());
  for (const uint32_t number : {family, model, leaf1.eax & 15}) {
    text.append("-").append(std::to_string(number));
  }
  for (const int cache : {_SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE}) {
    text.append("-").append(std::to_string(std::max(0L, sysconf(cache)) >> 10)).append("K");
  }
  return text;
}

CpuFeatures detect() {
  CpuFeatures features = core::detect_features({cpuid, enabled_states, request_tiles});
  features.model_name = brand_string();
  features.signature = signature(cpuid(1));
  features.fast_bf16 = features.avx512_bf16 && core::has_fast_bf16(features.signature);
  return features;
}

#else

CpuFeatures detect() {
  CpuFeatures features;
  features.signature = "unknown";
  return features;
}

#endif

// The level in use, or -1 before the first question.
std::atomic<int> current_level{-1};
std::mutex reason_mutex;
std::string reason_text;

void use_isa(Isa isa, std::string reason) {
  if (isa > cpu_features().best) {
    throw Unsupported("[isa] " + std::string(name(isa)) + " was asked for (" + reason +
                      "), but the best level of this CPU is " +
                      std::string(name(cpu_features().best)));
  }
  const std::lock_guard lock(reason_mutex);
  current_level.store(static_cast<int>(isa));
  reason_text = std::move(reason);
}

// cgroup v2: "max 100000" or "<quota> <period>"; v1: two files. 0 means no quota.
int quota_cpus() {
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period) {
    if (quota == "max" || period <= 0) return 0;
    return std::max(1, static_cast<int>(std::strtod(quota.c_str(), nullptr) / period));
  }
  std::ifstream v1_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream v1_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double value = 0;
  if (v1_quota >> value && v1_period >> period && value > 0 && period > 0) {
    return std::max(1, static_cast<int>(value / period));
  }
  return 0;
}

// Of the GPUs that kernels are compiled for: bfloat16 products, asynchronous copies.
constexpr int32_t kLeastArch = 80;

// Why kernels do not run on a GPU, or nothing.
std::string refusal_of(const Backend& cuda, int32_t index) {
  const int32_t arch = cuda.arch(index);
  if (arch >= kLeastArch) return "";
  return "cuda:" + std::to_string(index) + " is a " + cuda.model_name(index) +
         " of compute capability " + std::to_string(arch / 10) + "." + std::to_string(arch % 10) +
         ", kernels need 8.0 or later";
}

[[noreturn]] void refuse_device(std::string_view text, std::string_view argument) {
  std::string message(argument);
  message += ": expected ";
  for (const Device known : available_devices()) {
    message += (known == Device{} ? "\"" : ", \"") + name(known) + '"';
  }
  message.append(", got \"").append(text).append("\"");
  if (text.starts_with("cuda")) {
    message.append("; CUDA: ").append(cuda_status());
    const Backend* cuda = cuda_backend();
    for (int32_t i = 0; cuda != nullptr && i < cuda->num_devices(); ++i) {
      if (const std::string why = refusal_of(*cuda, i); !why.empty()) message.append("; ") += why;
    }
  }
  throw InvalidArgument(message);
}

}  // namespace

std::vector<Device> available_devices() {
  std::vector<Device> devices = {Device{}};
  const Backend* cuda = cuda_backend();
  const int32_t count = cuda == nullptr ? 0 : cuda->num_devices();
  for (int32_t i = 0; i < count; ++i) {
    if (refusal_of(*cuda, i).empty()) devices.push_back({DeviceKind::cuda, i});
  }
  return devices;
}

std::string name(Device device) {
  if (device == Device{}) return "cpu";
  const bool is_cpu = device.kind == DeviceKind::cpu;
  return (is_cpu ? "cpu:" : "cuda:") + std::to_string(device.index);
}

Device parse_device(std::string_view text, std::string_view argument) {
  const std::vector<Device> devices = available_devices();
  if (text == "auto") return devices.back();
  for (const Device device : devices) {
    if (text == name(device)) return device;
    if (text == "cuda" && device == Device{DeviceKind::cuda, 0}) return device;
  }
  refuse_device(text, argument);
}

void check_device(Device device, std::string_view argument) {
  for (const Device known : available_devices()) {
    if (device == known) return;
  }
  refuse_device(name(device), argument);
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

std::string describe_bf16(Isa isa, const CpuFeatures& features) {
  const std::string tiles = isa >= Isa::amx ? "tiles" : "";
  if (isa < Isa::avx512 || !features.avx512_bf16) return "none at this level";
  if (features.fast_bf16) return tiles.empty() ? "vectors" : tiles + " and vectors";
  return (tiles.empty() ? "none" : tiles) +
         "; vectors multiply float32, which is faster on this CPU";
}

Isa current_isa() {
  const int level = current_level.load();
  if (level >= 0) return static_cast<Isa>(level);
  if (const auto text = env::isa()) {
    use_isa(parse_isa(*text), "EFFINFER_ISA=" + *text);
  } else {
    use_isa(cpu_features().best, "best of this CPU");
  }
  return static_cast<Isa>(current_level.load());
}

void set_isa(Isa isa) {
  use_isa(isa, "set_isa()");
}

Target current_target(Device device) {
  if (device.kind == DeviceKind::cpu) return {device, current_isa()};
  const Backend& cuda = *cuda_backend();
  const int index = device.index;
  return {device, current_isa(), cuda.arch(index), cuda.shared_bytes(index), cuda.l2_bytes(index)};
}

std::vector<Isa> available_isas() {
  std::vector<Isa> levels;
  for (int level = 0; level <= static_cast<int>(cpu_features().best); ++level) {
    levels.push_back(static_cast<Isa>(level));
  }
  return levels;
}

std::string_view name(Isa isa) {
  return kIsaNames[static_cast<size_t>(isa)];
}

Isa parse_isa(std::string_view text) {
  for (size_t i = 0; i < kIsaNames.size(); ++i) {
    if (kIsaNames[i] == text) return static_cast<Isa>(i);
  }
  throw InvalidArgument("[isa] expected portable, avx2, avx512 or amx; got \"" + std::string(text) +
                        "\"");
}

std::string isa_reason() {
  current_isa();
  const std::lock_guard lock(reason_mutex);
  return reason_text;
}

namespace {

// What the system grants this process now.
ThreadChoice granted_threads() {
  ThreadChoice choice;
  const int online = std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  cpu_set_t mask;
  CPU_ZERO(&mask);
  const int affinity =
      sched_getaffinity(0, sizeof mask, &mask) == 0 ? std::max(1, CPU_COUNT(&mask)) : online;
  const int quota = quota_cpus();
  choice.quota_limited = quota > 0 && quota < std::min(online, affinity);
  choice.threads = std::min(online, affinity);
  choice.reason = affinity < online ? "affinity mask" : "CPUs of the machine";
  if (choice.quota_limited) {
    choice.threads = quota;
    choice.reason = "cgroup CPU quota";
  }
  return choice;
}

}  // namespace

ThreadChoice default_threads() {
  return usable_threads(0);
}

ThreadChoice usable_threads(int wanted) {
  const ThreadChoice granted = granted_threads();
  const std::optional<int> variable = wanted > 0 ? std::nullopt : env::threads();
  if (wanted <= 0 && !variable) return granted;
  ThreadChoice choice = granted;
  const int asked = variable.value_or(wanted);
  choice.reason = variable ? "EFFINFER_THREADS=" + std::to_string(asked) : "asked for";
  if (asked > granted.threads) {
    choice.reason = (variable ? choice.reason : std::to_string(asked) + " asked for") +
                    ", limited by the " + granted.reason;
  }
  choice.threads = std::min(asked, granted.threads);
  return choice;
}

}  // namespace effinfer
