// Which arithmetic each phase uses for a matmul operand.
#pragma once

#include <string_view>

#include "effinfer/compiler.h"
#include "effinfer/device.h"
#include "effinfer/graph.h"
#include "ops/operand.h"

namespace effinfer::compiler {

// Reads the arithmetic of an attribute, such as "int8" or "bf16"; throws FormatError.
ops::Arithmetic parse_arithmetic(std::string_view text);

std::string_view phase_key(Phase phase);  // the attribute that holds it

// Annotates a node that makes an operand.
void set_arithmetic(Node& node, std::string_view decode, std::string_view prefill);

// Whether quantised weights are multiplied faster as integers than as any floats, however many the
// rows: vectors without tiles.
bool integers_for_many_rows(const Target& target);

// Whether matmuls of many rows are the faster for bfloat16.
bool bf16_panels(const Target& target);
// The same of a prompt's products with bf16 pages: those of an attention, column_index or
// block_index.
bool bf16_attention(const Node& node, const Target& target);

}  // namespace effinfer::compiler
