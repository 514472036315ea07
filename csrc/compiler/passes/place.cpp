// Names the device of every value. There is one device, so there are no copies to insert.
#include "compiler/passes.h"

namespace effinfer::compiler {

void place(Graph& graph, const CompileOptions&) {
  for (Value& value : graph.values) value.device = "cpu";
}

}  // namespace effinfer::compiler
