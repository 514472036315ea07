// A model on two devices: its first layers as an executable of their own, which runs before that of
// the others.
#pragma once

#include <memory>
#include <string>

#include "effinfer/compiler.h"

namespace effinfer {

struct ExecutableHalves {
  // Of options with a front. Throws as compile(), and InvalidArgument for a graph that cannot be
  // cut so.
  static std::shared_ptr<Executable> compile(const Graph& graph,
                                             std::shared_ptr<const WeightSource> weights,
                                             std::shared_ptr<ThreadPool> pool,
                                             const CompileOptions& options);
  // Which layers are on which device, and why; empty where nobody asked for two devices.
  EFFINFER_API static const std::string& placement(const Executable& executable);
};

}  // namespace effinfer
