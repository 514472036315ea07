// The report of an executable: what runs, why, and where everything lies.
#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>

#include "compiler/arithmetic.h"
#include "compiler/memory_plan.h"
#include "compiler/passes.h"
#include "effinfer/tuning.h"
#include "executor/executable_impl.h"
#include "graph/op_specs.h"
#include "graph/text.h"

namespace effinfer {
namespace {

using Row = std::vector<std::string>;

// Columns as wide as their widest cell; the last one is not padded.
void print_table(std::ostream& out, const std::vector<Row>& rows) {
  std::vector<size_t> widths;
  for (const Row& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const Row& row : rows) {
    out << " ";
    for (size_t i = 0; i < row.size(); ++i) {
      out << ' ' << row[i];
      if (i + 1 < row.size()) out << std::string(widths[i] - row[i].size() + 1, ' ');
    }
    out << '\n';
  }
}

std::string mebibytes(size_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / (1 << 20) << " MiB";
  return out.str();
}

void print_passes(std::ostream& out, const std::set<std::string>& skipped) {
  out << "passes\n";
  std::vector<Row> rows;
  for (const compiler::Pass& pass : compiler::passes()) {
    const std::string name(pass.name);
    rows.push_back({name, skipped.contains(name) ? "off" : "ran"});
  }
  print_table(out, rows);
}

void print_calls(std::ostream& out, const char* phase, const executor::Program& program) {
  out << "calls of " << phase << '\n';
  std::vector<Row> rows = {{"node", "kernel", "at the largest step"}};
  for (const CallInfo& info : program.infos) {
    rows.push_back({info.node, info.kernel, info.shapes});
  }
  print_table(out, rows);
}

void print_weights(std::ostream& out, const weights::WeightStore& weights) {
  out << "weights: " << mebibytes(weights.packed_bytes()) << " packed\n";
  const PackCacheReport& cache = weights.pack_cache();
  out << "pack cache: " << name(cache.state) << (cache.path.empty() ? "" : " " + cache.path)
      << (cache.reason.empty() ? "" : " (" + cache.reason + ")") << '\n';
  std::vector<Row> rows = {{"name", "type", "kept", "bytes in the source", "bytes of our own"}};
  for (const weights::WeightStore::Use& use : weights.uses()) {
    rows.push_back({use.name, std::string(name(use.source)), use.form,
                    std::to_string(use.source_bytes), std::to_string(use.bytes)});
  }
  print_table(out, rows);
}

void print_arena(std::ostream& out, const Graph& graph, const CompileOptions& options,
                 size_t peak) {
  out << "arena: peak " << peak << " bytes (" << mebibytes(peak) << ")\n";
  std::vector<int> last(graph.values.size(), -1);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const ValueId id : graph.nodes[i].inputs) last[static_cast<size_t>(id)] = int(i);
  }
  std::vector<Row> rows = {{"value", "type", "offset", "bytes", "nodes"}};
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    for (size_t j = 0; j < node.outputs.size(); ++j) {
      const Value& value = graph.value(node.outputs[j]);
      const int64_t offset = node.get_ints(graph::kArenaKey)[j];
      const int end = std::max(last[static_cast<size_t>(node.outputs[j])], static_cast<int>(i));
      rows.push_back({"%" + value.name,
                      std::string(name(value.dtype)) + graph::to_string(value.shape),
                      offset >= 0 ? std::to_string(offset)
                                  : (compiler::is_handle(value) ? "handle" : "logits"),
                      std::to_string(compiler::largest_bytes(value, node, options)),
                      std::to_string(i) + ".." + std::to_string(end)});
    }
  }
  print_table(out, rows);
}

// What costs speed or memory on this machine with these weights.
std::vector<std::string> slower_paths(const Graph& graph, const CompileOptions& options,
                                      const weights::WeightStore& weights, const Target& target) {
  std::vector<std::string> notes;
  const bool fast = options.precision == Precision::fast;
  const bool has_bf16 = cpu_features().avx512_bf16 && target.isa >= Isa::avx512;
  if (fast && !options.deterministic && !has_bf16) {
    notes.push_back(
        "what prefill does not multiply as integers are float32 panels: no AVX512-BF16 at this ISA "
        "level");
  }
  std::map<std::string, int> repacked;
  for (const weights::WeightStore::Use& use : weights.uses()) {
    const bool packed = use.form.starts_with("packed");
    if (packed && use.bytes > use.source_bytes + use.source_bytes / 4) {
      ++repacked[std::string(name(use.source)) + " is " + use.form];
    }
  }
  for (const auto& [what, count] : repacked) {
    notes.push_back(what + ": more than 25 % above the source's size (" + std::to_string(count) +
                    " weights)");
  }
  int dense = 0;
  for (const Node& node : graph.nodes) {
    dense += node.has(graph::kDecodeKey) && node.get_string(graph::kDecodeKey) == "f32" ? 1 : 0;
  }
  if (fast && dense > 0) {
    notes.push_back(std::to_string(dense) +
                    " operands stay float32 in decode: their weights are not quantised");
  }
  return notes;
}

void print_cpu(std::ostream& out, const ThreadPool& pool, const std::string& tuning_trouble,
               Isa isa) {
  out << "threads " << pool.size() << " (" << pool.reason()
      << ")\nfetch ahead, bytes into L2/L1: " << describe_tuning()
      << (tuning_trouble.empty() ? "" : "; not kept: " + tuning_trouble)
      << "\nbfloat16 products of prefill: " << describe_bf16(isa) << '\n';
}

}  // namespace

const PackCacheReport& Executable::pack_cache() const {
  return impl_->shared.weights->pack_cache();
}

const std::string& Executable::tuning_trouble() const {
  return impl_->tuning_trouble;
}

std::string Executable::explain() const {
  const Impl& impl = *impl_;
  const CompileOptions& options = impl.shared.options;
  std::ostringstream out;
  if (!impl.placement.empty()) out << impl.placement << '\n';
  if (impl.front) out << impl.front->explain();
  out << "graph " << impl.shared.graph.name << "\ndevice " << name(options.device) << "\nisa "
      << impl.isa << '\n';
  const bool on_cpu = options.device.kind == DeviceKind::cpu;
  if (on_cpu) print_cpu(out, *impl.pool, impl.tuning_trouble, impl.shared.target.isa);
  out << "precision " << (options.precision == Precision::f32 ? "f32" : "fast")
      << (options.deterministic ? ", deterministic" : "") << "\nkv " << name(*options.kv_dtype)
      << "\nstep at most " << options.max_tokens << " tokens, " << options.max_sequences
      << " sequences of " << options.max_seq_len << " tokens, " << options.max_rows
      << " rows of logits\n";
  if (!on_cpu && impl.limits.vocab_size > 0) {
    out << "the host samples: from up to " << impl.shared.max_top
        << " of the highest logits a row when that is enough, or where penalties, typical_p or "
           "logprobs need all; else the device draws tokens\n";
  } else if (impl.shared.max_top > 0) {
    out << "head keeps up to " << impl.shared.max_top
        << " of the highest logits a row, and writes no others, when sampling needs no more\n";
  } else if (impl.limits.vocab_size > 0) {
    out << "head writes all logits: it is no single matmul\n";
  }
  print_passes(out, impl.skipped);
  if (impl.programs.size() == 1) {
    print_calls(out, "both phases", impl.programs[0]);
  } else {
    print_calls(out, "decode", impl.programs[0]);
    print_calls(out, "prefill", impl.programs[1]);
  }
  print_weights(out, *impl.shared.weights);
  print_arena(out, impl.shared.graph, options, impl.arena_bytes);
  out << "slower paths\n";
  std::vector<std::string> notes;
  if (on_cpu) {
    notes = slower_paths(impl.shared.graph, options, *impl.shared.weights, impl.shared.target);
  } else {
    if (impl.programs.size() == 1) {
      notes.emplace_back(
          "prompts' matmuls have the kernels of decoding, as they share its arithmetic");
    }
  }
  for (const std::string& note : notes) out << "  " << note << '\n';
  if (notes.empty()) out << "  none\n";
  return out.str();
}

}  // namespace effinfer
