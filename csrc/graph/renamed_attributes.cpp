// Attributes that had other names once. Only the text form knows them: files hold it. A node that
// is built now has the names of op_table.cpp.
#include <array>

#include "effinfer/error.h"
#include "graph/op_specs.h"

namespace effinfer::graph {
namespace {

struct Renamed {
  std::string_view op;
  std::string_view before;
  std::string_view now;
};

constexpr std::array kRenamed = {
    Renamed{"attention", "scale", "sm_scale"},
    Renamed{"attention", "window", "window_left"},
    Renamed{"attention", "sinks", "sink_tokens"},
    Renamed{"attention", "soft_cap", "logits_soft_cap"},
    Renamed{"column_index", "scale", "sm_scale"},
    Renamed{"column_index", "sinks", "sink_tokens"},
    Renamed{"column_index", "window", "local_tokens"},
    Renamed{"block_index", "scale", "sm_scale"},
    Renamed{"block_index", "sinks", "sink_tokens"},
    Renamed{"block_index", "window", "local_tokens"},
};

}  // namespace

void rename_attributes(Node& node) {
  for (const Renamed& renamed : kRenamed) {
    if (node.op != renamed.op || !node.has(renamed.before)) continue;
    auto attribute = node.attributes.extract(node.attributes.find(renamed.before));
    attribute.key() = renamed.now;
    if (node.attributes.insert(std::move(attribute)).inserted) continue;
    throw InvalidArgument("[" + node.op + "] " + std::string(renamed.before) +
                          ": expected only its name of today, " + std::string(renamed.now) +
                          ", got both");
  }
}

}  // namespace effinfer::graph
