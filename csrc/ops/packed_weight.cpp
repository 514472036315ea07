#include "ops/packed_weight.h"

#include "effinfer/error.h"

namespace effinfer::ops {

PackedFormat packed_format(DType dtype, TernaryForm form) {
  constexpr auto dense = [](QuantBits bits) {
    return PackedFormat{bits, ScaleKind::dense, false, 0, 0};
  };
  constexpr auto direct = [](QuantBits bits, bool has_min, uint8_t zero) {
    return PackedFormat{bits, ScaleKind::direct, has_min, 32, zero};
  };
  constexpr auto super = [](QuantBits bits, bool has_min, uint8_t sub_block, uint8_t zero) {
    return PackedFormat{bits, ScaleKind::super, has_min, sub_block, zero};
  };
  if (form != TernaryForm::u4) {
    const QuantBits bits = form == TernaryForm::t2 ? QuantBits::t2 : QuantBits::t1_6;
    if (!is_ternary(dtype)) {
      throw InvalidArgument("[pack] dtype: expected a ternary type, got " +
                            std::string(name(dtype)));
    }
    return {bits, dtype == DType::i2_s ? ScaleKind::row : ScaleKind::group, false, 0, 1};
  }
  switch (dtype) {
    case DType::f32:
      return dense(QuantBits::f32);
    case DType::f16:
      return dense(QuantBits::f16);
    case DType::bf16:
      return dense(QuantBits::bf16);
    case DType::q8_0:
    case DType::iq4_nl:  // its 16 values are signed bytes
      return direct(QuantBits::u8, false, 128);
    case DType::q4_0:
      return direct(QuantBits::u4, false, 8);
    case DType::q4_1:
      return direct(QuantBits::u4, true, 0);
    case DType::q5_0:
      return direct(QuantBits::u5, false, 16);
    case DType::q5_1:
      return direct(QuantBits::u5, true, 0);
    case DType::q2_k:
      return super(QuantBits::u4, true, 16, 0);
    case DType::q3_k:
      return super(QuantBits::u4, false, 16, 4);
    case DType::q4_k:
      return super(QuantBits::u4, true, 32, 0);
    case DType::q5_k:
      return super(QuantBits::u5, true, 32, 0);
    case DType::q6_k:
      return super(QuantBits::u6, false, 16, 32);
    case DType::iq4_xs:
      return super(QuantBits::u8, false, 32, 128);
    case DType::tq1_0:
    case DType::tq2_0:
      return super(QuantBits::u4, false, 32, 1);
    case DType::i2_s:  // its scale does not fit the other forms
      return {QuantBits::t2, ScaleKind::row, false, 0, 1};
    default:
      throw InvalidArgument("[pack] dtype: expected a weight type, got " +
                            std::string(name(dtype)));
  }
}

std::string to_string(const PackedFormat& format) {
  constexpr const char* kBits[] = {"u4", "u5", "u6", "u8", "f16", "bf16", "f32", "t2", "t1_6"};
  std::string text = kBits[static_cast<int>(format.bits)];
  if (format.scales == ScaleKind::dense) return text;
  if (format.scales == ScaleKind::row) return text + "/row";
  if (format.scales == ScaleKind::group) return text + "/group";
  text += format.scales == ScaleKind::direct ? "/direct" : "/super";
  text += std::to_string(format.sub_block);
  if (format.has_min) text += "+min";
  if (format.zero != 0) text.append("-").append(std::to_string(format.zero));
  return text;
}

}  // namespace effinfer::ops
