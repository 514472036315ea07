#include "compiler/passes.h"
#include "core/env.h"
#include "effinfer/error.h"

namespace effinfer::compiler {
namespace {

std::string known_passes() {
  std::string names;
  for (const Pass& pass : passes()) {
    names += (names.empty() ? "" : ", ") + std::string(pass.name);
  }
  return names;
}

const Pass& find_pass(std::string_view name) {
  for (const Pass& pass : passes()) {
    if (pass.name == name) return pass;
  }
  throw InvalidArgument("[compile] pass: expected one of " + known_passes() + ", got \"" +
                        std::string(name) + "\"");
}

}  // namespace

const std::vector<Pass>& passes() {
  static const std::vector<Pass> list = {
      {"hoist_select_rows", hoist_select_rows, true},
      {"canonicalize", canonicalize, false},
      {"merge_projections", merge_projections, true},
      {"fuse_norm", fuse_norm, true},
      {"fuse_activation", fuse_activation, true},
      {"fuse_residual", fuse_residual, true},
      {"fuse_rope_append", fuse_rope_append, true},
      {"fuse_attention", fuse_attention, true},
      {"fuse_regions", fuse_regions, true, true},
      {"choose_arithmetic", choose_arithmetic, false},
      {"plan_memory", plan_memory, false},
  };
  return list;
}

std::set<std::string> run_passes(Graph& graph, const CompileOptions& options) {
  std::set<std::string> disabled = env::disabled_passes();
  disabled.insert(options.disabled_passes.begin(), options.disabled_passes.end());
  for (const std::string& name : disabled) {
    if (!find_pass(name).optional) {
      throw InvalidArgument("[compile] disabled_passes: " + name +
                            " makes the graph runnable and cannot be turned off");
    }
  }
  graph.verify();
  for (const Pass& pass : passes()) {
    if (pass.cpu_only && options.device.kind != DeviceKind::cpu) disabled.emplace(pass.name);
    if (disabled.contains(std::string(pass.name))) continue;
    pass.run(graph, options);
    try {
      graph.verify();
    } catch (const FormatError& error) {
      throw InternalError("[compile] the pass " + std::string(pass.name) +
                          " broke the graph: " + error.what());
    }
  }
  return disabled;
}

}  // namespace effinfer::compiler

namespace effinfer {

std::vector<std::string> pass_names() {
  std::vector<std::string> names;
  for (const compiler::Pass& pass : compiler::passes()) names.emplace_back(pass.name);
  return names;
}

Graph run_pass(std::string_view name, const Graph& graph, const CompileOptions& options) {
  Graph result = graph;
  result.verify();
  compiler::find_pass(name).run(result, options);
  result.verify();
  return result;
}

}  // namespace effinfer
