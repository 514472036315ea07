// The element-by-element operators: float32 in, float32 out, any shape. `out` has the shape of the
// inputs and may be one of them. Throws InvalidArgument for another dtype or unequal shapes.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

// What an operator of one input does to each element. From silu on they are activations, which
// gated operators and the GLU of a matmul take too.
enum class UnaryOp : uint8_t { none, scale, softcap, silu, gelu, gelu_tanh, relu_squared, sigmoid };

// What graphs, Python and messages call an operator and its parameter. An empty name of a parameter
// says that it has none.
struct UnaryOpNames {
  std::string_view op;
  std::string_view parameter = {};
};
// By UnaryOp. The graph's operators, their lowering and the Python functions are made from this.
inline constexpr auto kUnaryOps = std::to_array<UnaryOpNames>({
    {"none"},
    {"scale", "factor"},
    {"softcap", "cap"},
    {"silu"},
    {"gelu"},
    {"gelu_tanh"},
    {"relu_squared"},
    {"sigmoid"},
});

constexpr bool is_activation(UnaryOp op) {
  return op >= UnaryOp::silu && static_cast<size_t>(op) < kUnaryOps.size();
}
// visit(op) for every operator but none.
template <class Visit>
constexpr void for_unary_ops(Visit&& visit) {
  for (size_t i = 1; i < kUnaryOps.size(); ++i) visit(static_cast<UnaryOp>(i));
}
// These throw InvalidArgument where there is no such operator, or activation; "none" is none.
EFFINFER_API const UnaryOpNames& names(UnaryOp op);
EFFINFER_API std::string_view name(UnaryOp op);
EFFINFER_API UnaryOp parse_unary_op(std::string_view text);
EFFINFER_API UnaryOp parse_activation(std::string_view text);

// `parameter` is the factor of scale and the cap of softcap; activations have none.
EFFINFER_API void unary(UnaryOp op, const TensorView& x, float parameter, float* out,
                        const Executor& executor);

// x * sigmoid(x) (Elfwing et al., arXiv:1702.03118).
inline void silu(const TensorView& x, float* out, const Executor& executor) {
  unary(UnaryOp::silu, x, 0.0f, out, executor);
}
// x / 2 * (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel, arXiv:1606.08415).
inline void gelu(const TensorView& x, float* out, const Executor& executor) {
  unary(UnaryOp::gelu, x, 0.0f, out, executor);
}
// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel, arXiv:1606.08415).
inline void gelu_tanh(const TensorView& x, float* out, const Executor& executor) {
  unary(UnaryOp::gelu_tanh, x, 0.0f, out, executor);
}
// max(x, 0)^2 (So et al., "Primer", arXiv:2109.08668).
inline void relu_squared(const TensorView& x, float* out, const Executor& executor) {
  unary(UnaryOp::relu_squared, x, 0.0f, out, executor);
}
// 1 / (1 + e^-x); as the gate of a product it is the GLU of Dauphin et al., arXiv:1612.08083.
inline void sigmoid(const TensorView& x, float* out, const Executor& executor) {
  unary(UnaryOp::sigmoid, x, 0.0f, out, executor);
}
// cap * tanh(x / cap), cap > 0 (Gemma 2, arXiv:2408.00118, section 2).
inline void softcap(const TensorView& x, float cap, float* out, const Executor& executor) {
  unary(UnaryOp::softcap, x, cap, out, executor);
}
inline void scale(const TensorView& x, float factor, float* out, const Executor& executor) {
  unary(UnaryOp::scale, x, factor, out, executor);
}

// What an operator of two inputs does to each pair of elements.
enum class BinaryOp : uint8_t { add, mul };
// By BinaryOp, for the same uses as kUnaryOps.
inline constexpr auto kBinaryOpNames = std::to_array<std::string_view>({"add", "mul"});

// These throw InvalidArgument where there is no such operator.
EFFINFER_API std::string_view name(BinaryOp op);
EFFINFER_API BinaryOp parse_binary_op(std::string_view text);

EFFINFER_API void binary(BinaryOp op, const TensorView& a, const TensorView& b, float* out,
                         const Executor& executor);

inline void add(const TensorView& a, const TensorView& b, float* out, const Executor& executor) {
  binary(BinaryOp::add, a, b, out, executor);
}
inline void mul(const TensorView& a, const TensorView& b, float* out, const Executor& executor) {
  binary(BinaryOp::mul, a, b, out, executor);
}

}  // namespace effinfer::ops
