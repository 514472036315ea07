// A model: a graph and the weights that it names.
#pragma once

#include <memory>
#include <string>

#include "effinfer/export.h"
#include "effinfer/graph.h"
#include "effinfer/weights.h"

namespace effinfer {

// The metadata key of an artifact: the graph's text form.
inline constexpr const char* kGraphKey = "effinfer.graph";

struct EFFINFER_API Model {
  Graph graph;
  std::shared_ptr<const WeightSource> weights;

  // Loads an artifact: a GGUF file that `effinfer compile` wrote. Throws FileError, FormatError; a
  // GGUF file without a graph is FormatError and says how to make an artifact of it.
  static std::shared_ptr<const Model> load(const std::string& path);
};

}  // namespace effinfer
