#include "weights/ternary_form.h"

#include <fstream>

#include "effinfer/error.h"

namespace effinfer::weights {
namespace {

// The size of the cache that the first CPU shares, "32768K"; 32 MiB where the system does not tell.
// Not sysconf(), which in a virtual machine may count the caches of all CPUs of the host.
size_t last_level_cache_bytes() {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
  size_t kilobytes = 0;
  char unit = 0;
  if (file >> kilobytes >> unit && unit == 'K' && kilobytes > 0) return kilobytes << 10;
  return size_t{32} << 20;
}

}  // namespace

ops::TernaryForm ternary_form(TernaryPacking packing, size_t num_bytes, const Target& target) {
  if (packing == TernaryPacking::t2) return ops::TernaryForm::t2;
  if (packing == TernaryPacking::t1_6) return ops::TernaryForm::t1_6;
  // The linear decode of t1_6 needs byte products that do not saturate.
  const bool vnni = target.isa >= Isa::avx512;
  const bool from_memory = num_bytes > last_level_cache_bytes();
  return vnni && from_memory ? ops::TernaryForm::t1_6 : ops::TernaryForm::t2;
}

}  // namespace effinfer::weights

namespace effinfer {

TernaryPacking parse_ternary_packing(std::string_view text) {
  if (text == "auto") return TernaryPacking::automatic;
  if (text == "t2") return TernaryPacking::t2;
  if (text == "t1_6") return TernaryPacking::t1_6;
  throw InvalidArgument("[compile] ternary_packing: expected auto, t2 or t1_6, got \"" +
                        std::string(text) + "\"");
}

}  // namespace effinfer
