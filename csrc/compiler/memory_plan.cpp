#include "compiler/memory_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "compiler/arithmetic.h"
#include "effinfer/error.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {
namespace {

int64_t round_up(int64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

// The smallest gap of at least `bytes` between the blocks, which are sorted by offset; after the
// last one when there is none.
int64_t best_gap(const std::vector<std::pair<int64_t, int64_t>>& blocks, int64_t bytes) {
  int64_t best = -1;
  int64_t best_size = std::numeric_limits<int64_t>::max();
  int64_t end = 0;
  for (const auto& [offset, size] : blocks) {
    const int64_t gap = offset - end;
    if (gap >= bytes && gap < best_size) {
      best = end;
      best_size = gap;
    }
    end = std::max(end, offset + size);
  }
  return best < 0 ? end : best;
}

}  // namespace

ArenaPlan plan_arena(std::span<const Lifetime> lifetimes) {
  ArenaPlan plan;
  plan.offsets.resize(lifetimes.size());
  std::vector<size_t> order(lifetimes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return lifetimes[a].bytes > lifetimes[b].bytes; });
  std::vector<size_t> placed;
  std::vector<std::pair<int64_t, int64_t>> blocks;
  for (const size_t index : order) {
    const Lifetime& life = lifetimes[index];
    blocks.clear();
    for (const size_t other : placed) {
      const Lifetime& neighbour = lifetimes[other];
      if (neighbour.first > life.last || neighbour.last < life.first) continue;
      blocks.emplace_back(plan.offsets[other], round_up(neighbour.bytes));
    }
    std::sort(blocks.begin(), blocks.end());
    plan.offsets[index] = best_gap(blocks, round_up(life.bytes));
    plan.bytes = std::max(plan.bytes, plan.offsets[index] + round_up(life.bytes));
    placed.push_back(index);
  }
  return plan;
}

bool is_own(const Node& node) {
  return node.has(graph::kOwnKey);
}

bool returns_logits(const Graph& graph) {
  return graph.value(graph.outputs[0]).shape[0].kind == Dim::Kind::rows;
}

bool is_handle(const Value& value) {
  return value.dtype == DType::kv || value.dtype == DType::visits;
}

int64_t largest(const Dim& dim, const CompileOptions& options) {
  switch (dim.kind) {
    case Dim::Kind::tokens:
      return options.max_tokens;
    case Dim::Kind::sequences:
      return options.max_sequences;
    case Dim::Kind::rows:
      return options.max_rows;
    case Dim::Kind::constant:
      break;
  }
  return dim.value;
}

int64_t largest_bytes(const Value& value, const Node& producer, const CompileOptions& options) {
  if (is_handle(value)) return 0;
  int64_t bytes = 0;
  bool overflow = false;
  if (value.dtype == DType::act) {
    const int64_t cols = value.shape[1].value;
    for (const std::string_view key : {graph::kDecodeKey, graph::kPrefillKey}) {
      const ops::Arithmetic arithmetic = parse_arithmetic(producer.get_string(key));
      bytes = std::max(bytes, ops::operand_row_bytes(arithmetic, cols));
    }
    overflow = __builtin_mul_overflow(bytes, largest(value.shape[0], options), &bytes);
  } else {
    bytes = dtype_info(value.dtype).block_bytes;
    for (const Dim& dim : value.shape) {
      overflow |= __builtin_mul_overflow(bytes, largest(dim, options), &bytes);
    }
  }
  // An exabyte arena is refused here rather than by arithmetic that wraps later.
  if (overflow || bytes > (int64_t{1} << 60)) {
    throw OutOfMemory("[compile] %" + value.name + " is too large for any memory");
  }
  return bytes;
}

}  // namespace effinfer::compiler
