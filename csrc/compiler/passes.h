// The passes, in the order in which pipeline.cpp runs them. Each is a file in passes/: what it
// looks for, what it writes instead, why that is allowed.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "effinfer/compiler.h"

namespace effinfer::compiler {

struct Pass {
  std::string_view name;
  void (*run)(Graph&, const CompileOptions&);
  bool optional;          // may be turned off
  bool cpu_only = false;  // means nothing on other devices
};

// The list has the order in which passes run.
const std::vector<Pass>& passes();

// Runs them with the verifier between; those in `options.disabled_passes` and EFFINFER_PASSES are
// left out. Returns the names of the passes that did not run. Throws InvalidArgument for an unknown
// name and for a pass that cannot be turned off.
std::set<std::string> run_passes(Graph& graph, const CompileOptions& options);

void hoist_select_rows(Graph& graph, const CompileOptions& options);
void canonicalize(Graph& graph, const CompileOptions& options);
void merge_projections(Graph& graph, const CompileOptions& options);
void fuse_norm(Graph& graph, const CompileOptions& options);
void fuse_activation(Graph& graph, const CompileOptions& options);
void fuse_residual(Graph& graph, const CompileOptions& options);
void fuse_rope_append(Graph& graph, const CompileOptions& options);
void fuse_attention(Graph& graph, const CompileOptions& options);
void fuse_regions(Graph& graph, const CompileOptions& options);
void choose_arithmetic(Graph& graph, const CompileOptions& options);
void plan_memory(Graph& graph, const CompileOptions& options);

}  // namespace effinfer::compiler
