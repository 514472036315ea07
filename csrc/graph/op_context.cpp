#include "effinfer/error.h"
#include "graph/op_specs.h"
#include "graph/text.h"

namespace effinfer::graph {
namespace {

bool is_constant(const Dim& dim) {
  return dim.kind == Dim::Kind::constant;
}

}  // namespace

void OpContext::fail(std::string_view argument, const std::string& expected,
                     const std::string& got) const {
  throw InvalidArgument("[" + node_.op + "] " + std::string(argument) + ": expected " + expected +
                        ", got " + got);
}

const Shape& OpContext::matrix(size_t index, std::string_view argument, DType dtype) const {
  const Value& value = input(index);
  if (value.dtype != dtype || value.shape.size() != 2 || !is_constant(value.shape[1]) ||
      value.kind == Value::Kind::weight) {
    fail(argument, std::string(name(dtype)) + "[rows, columns]", type_to_string(value));
  }
  return value.shape;
}

const Shape& OpContext::ids(size_t index, std::string_view argument) const {
  const Value& value = input(index);
  if (value.dtype != DType::i32 || value.shape.size() != 1 || value.kind != Value::Kind::input) {
    fail(argument, "an input i32 of rank 1", "%" + value.name + " : " + type_to_string(value));
  }
  return value.shape;
}

const Shape& OpContext::weight(size_t index, std::string_view argument) const {
  const Value& value = input(index);
  if (value.kind != Value::Kind::weight || value.shape.size() != 2) {
    fail(argument, "a weight [rows, columns]", "%" + value.name + " : " + type_to_string(value));
  }
  return value.shape;
}

void OpContext::vector(size_t index, std::string_view argument, int64_t size) const {
  const Value& value = input(index);
  const bool plain =
      value.dtype == DType::f32 || value.dtype == DType::f16 || value.dtype == DType::bf16;
  if (value.kind != Value::Kind::weight || !plain || value.shape != Shape{Dim::constant(size)}) {
    fail(argument, "a weight [" + std::to_string(size) + "] of f32, f16 or bf16",
         "%" + value.name + " : " + type_to_string(value));
  }
}

void OpContext::same_shape(size_t index, std::string_view argument, const Shape& shape) const {
  if (input(index).shape != shape) {
    fail(argument, "shape " + to_string(shape), to_string(input(index).shape));
  }
}

void OpContext::num_inputs_is(size_t count) const {
  if (num_inputs() != count) {
    fail("inputs", std::to_string(count) + " inputs", std::to_string(num_inputs()));
  }
}

int64_t OpContext::positive(std::string_view attribute, int64_t least) const {
  const int64_t value = node_.get_int(attribute);
  if (value < least || value > kMaxCount) {
    fail(attribute, "an integer in " + std::to_string(least) + ".." + std::to_string(kMaxCount),
         std::to_string(value));
  }
  return value;
}

void OpContext::require(bool condition, std::string_view argument, const char* expected) const {
  if (!condition) fail(argument, expected, "another value");
}

}  // namespace effinfer::graph
