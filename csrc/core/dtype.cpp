#include "effinfer/dtype.h"

#include <array>
#include <string>

#include "effinfer/error.h"

namespace effinfer {
namespace {

// Entries have the order of the enumerators; block sizes and bytes are GGUF's.
constexpr std::array<DTypeInfo, kNumDTypes> kInfo = {{
    {"f32", 1, 4, false},        {"f16", 1, 2, false},     {"bf16", 1, 2, false},
    {"i8", 1, 1, false},         {"u8", 1, 1, false},      {"i32", 1, 4, false},
    {"i64", 1, 8, false},        {"q8_0", 32, 34, true},   {"q4_0", 32, 18, true},
    {"q4_1", 32, 20, true},      {"q5_0", 32, 22, true},   {"q5_1", 32, 24, true},
    {"q2_k", 256, 84, true},     {"q3_k", 256, 110, true}, {"q4_k", 256, 144, true},
    {"q5_k", 256, 176, true},    {"q6_k", 256, 210, true}, {"iq4_nl", 32, 18, true},
    {"iq4_xs", 256, 136, true},  {"tq1_0", 256, 54, true}, {"tq2_0", 256, 66, true},
    {"i2_s", 128, 32, true, 32}, {"f8_e4m3", 1, 1, false}, {"f8_e5m2", 1, 1, false},
    {"act", 1, 0, false},        {"kv", 1, 0, false},      {"visits", 1, 0, false},
}};

}  // namespace

const DTypeInfo& dtype_info(DType dtype) {
  return kInfo[static_cast<size_t>(dtype)];
}

DType parse_dtype(std::string_view text) {
  std::string known;
  for (int i = 0; i < kNumDTypes; ++i) {
    const DType dtype = static_cast<DType>(i);
    if (dtype_info(dtype).name == text) return dtype;
    known += (i == 0 ? "" : ", ") + std::string(dtype_info(dtype).name);
  }
  throw InvalidArgument("[dtype] expected one of " + known + "; got \"" + std::string(text) + "\"");
}

}  // namespace effinfer
