#include "io/gguf_types.h"

#include <algorithm>
#include <array>

namespace effinfer::gguf {
namespace {

// Source: enum ggml_type (ggml.h) and the block structs of ggml-common.h; i2_s: bitnet.cpp, in
// whose files 36 has another meaning than it once had in ggml's.
constexpr std::array kTensorTypes = {
    TensorType{0, "f32", 1, 4, DType::f32},
    TensorType{1, "f16", 1, 2, DType::f16},
    TensorType{2, "q4_0", 32, 18, DType::q4_0},
    TensorType{3, "q4_1", 32, 20, DType::q4_1},
    TensorType{6, "q5_0", 32, 22, DType::q5_0},
    TensorType{7, "q5_1", 32, 24, DType::q5_1},
    TensorType{8, "q8_0", 32, 34, DType::q8_0},
    TensorType{9, "q8_1", 32, 36, {}},
    TensorType{10, "q2_k", 256, 84, DType::q2_k},
    TensorType{11, "q3_k", 256, 110, DType::q3_k},
    TensorType{12, "q4_k", 256, 144, DType::q4_k},
    TensorType{13, "q5_k", 256, 176, DType::q5_k},
    TensorType{14, "q6_k", 256, 210, DType::q6_k},
    TensorType{15, "q8_k", 256, 292, {}},
    TensorType{16, "iq2_xxs", 256, 66, {}},
    TensorType{17, "iq2_xs", 256, 74, {}},
    TensorType{18, "iq3_xxs", 256, 98, {}},
    TensorType{19, "iq1_s", 256, 50, {}},
    TensorType{20, "iq4_nl", 32, 18, DType::iq4_nl},
    TensorType{21, "iq3_s", 256, 110, {}},
    TensorType{22, "iq2_s", 256, 82, {}},
    TensorType{23, "iq4_xs", 256, 136, DType::iq4_xs},
    TensorType{24, "i8", 1, 1, DType::i8},
    TensorType{25, "i16", 1, 2, {}},
    TensorType{26, "i32", 1, 4, DType::i32},
    TensorType{27, "i64", 1, 8, DType::i64},
    TensorType{28, "f64", 1, 8, {}},
    TensorType{29, "iq1_m", 256, 56, {}},
    TensorType{30, "bf16", 1, 2, DType::bf16},
    TensorType{34, "tq1_0", 256, 54, DType::tq1_0},
    TensorType{35, "tq2_0", 256, 66, DType::tq2_0},
    TensorType{36, "i2_s", 128, 32, DType::i2_s, 32},
    TensorType{39, "mxfp4", 32, 17, {}},
    TensorType{40, "nvfp4", 64, 36, {}},
    TensorType{41, "q1_0", 128, 18, {}},
};

}  // namespace

const TensorType* find_tensor_type(uint32_t id) {
  const auto found =
      std::lower_bound(kTensorTypes.begin(), kTensorTypes.end(), id,
                       [](const TensorType& type, uint32_t wanted) { return type.id < wanted; });
  return found != kTensorTypes.end() && found->id == id ? &*found : nullptr;
}

const TensorType* find_tensor_type(DType dtype) {
  const auto found = std::find_if(kTensorTypes.begin(), kTensorTypes.end(),
                                  [&](const TensorType& type) { return type.dtype == dtype; });
  return found != kTensorTypes.end() ? &*found : nullptr;
}

}  // namespace effinfer::gguf
