// A matmul node taken apart, and put together again: what the fusing passes edit.
#pragma once

#include <optional>
#include <vector>

#include "effinfer/graph.h"

namespace effinfer::compiler {

struct MatmulParts {
  struct Part {
    ValueId weight;
    std::optional<ValueId> bias;
    std::optional<ValueId> residual;
    ValueId output;
  };
  ValueId x;
  std::vector<Part> parts;

  static MatmulParts from(const Node& node);  // of a `matmul`
  // A node of `op` with the parts; its outputs are those of the parts.
  Node to_node(std::string op = "matmul") const;
};

}  // namespace effinfer::compiler
