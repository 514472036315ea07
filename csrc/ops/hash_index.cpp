#include "ops/hash_index.h"

#include <string>
#include <vector>

#include "effinfer/ops/visits.h"
#include "ops/paged_batch.h"
#include "ops/registry.h"

namespace effinfer::ops {
namespace {

std::vector<float> means_of(const Validator& check, const TensorView& means, const PagedKv& kv) {
  const Dims shape = {kv.num_kv_heads(), kv.head_dim()};
  std::vector<float> values(static_cast<size_t>(shape.num_elements()));
  if (means.dims.rank() == 0) return values;
  check.dtype("means", means, DType::f32);
  check.shape("means", means, shape);
  const auto* given = static_cast<const float*>(means.data);
  values.assign(given, given + values.size());
  for (const float value : values) check.finite("means", value);
  return values;
}

}  // namespace

std::string describe(const HashIndexProblem& p) {
  return "[hash_index] bits=" + std::to_string(p.tables.bits) +
         " tables=" + std::to_string(p.tables.tables) + " of each query head" +
         " heads=" + std::to_string(p.num_qo_heads) +
         " kv_heads=" + std::to_string(p.kv.num_kv_heads) +
         " head_dim=" + std::to_string(p.kv.head_dim) +
         " kv_dtype=" + std::string(name(p.kv.dtype)) +
         " sink_tokens=" + std::to_string(p.sink_tokens) +
         " local_tokens=" + std::to_string(p.local_tokens) + "; all keys: rows of prompts, or of " +
         "fewer than " + std::to_string(p.min_tokens) + " keys";
}

// As if all codes were known, without what depends on which keys are drawn.
Cost cost(const HashIndexProblem& p) {
  Cost cost;
  for (int64_t i = 0; i < p.visits.num_rows; ++i) {
    const VisitBlock& row = p.visits.blocks[p.visits.num_blocks + i];
    if (visits_all(p, row)) continue;
    const int64_t words = candidates_of(p, row).count() * p.tables.planes();
    cost.bytes += words * static_cast<int64_t>(sizeof(uint64_t)) * p.kv.num_kv_heads;
    cost.ops += 2 * (words + p.tables.planes() * p.kv.head_dim) * p.kv.num_kv_heads;
  }
  return cost;
}

void hash_visits(Visits& visits, const TensorView& q, const PagedKv& kv, const PagedBatch& batch,
                 const HashVisits& hashes, const VisitOptions& options, ThreadPool& pool) {
  const Validator check("hash_visits");
  HashIndexProblem p;
  p.num_qo_heads = check_queries(check, q, kv);
  p.batch = check_batch(check, batch, q.dims[0], kv);
  check_counts(check, options);
  check.expect(is_hash_bits(hashes.bits), "bits", "1 to 8", std::to_string(hashes.bits));
  check.expect(is_hash_tables(hashes.tables), "tables", "a multiple of 8 up to 256",
               std::to_string(hashes.tables));
  check.expect(visits.log_weights() != nullptr || visits.num_blocks() == 0, "visits",
               "lists with weights", "those without");
  const std::vector<float> means = means_of(check, hashes.means, kv);
  const std::vector<IndexedHead> heads(means.size(), IndexedHead::chosen);
  p.q = static_cast<const float*>(q.data);
  p.q_stride = int64_t{p.num_qo_heads} * kv.head_dim();
  p.kv = layer_of(kv);
  p.visits = plan_of(visits, check.op(), p.batch, p.num_qo_heads, kv.num_kv_heads());
  p.sink_tokens = options.sink_tokens;
  p.local_tokens = options.local_tokens;
  p.min_tokens = options.min_tokens;
  p.tables = {p.num_qo_heads / kv.num_kv_heads(), hashes.tables, hashes.bits};
  const std::vector<float> planes = hash_planes(p.tables, kv.head_dim(), hashes.seed);
  const std::vector<float> chances = hash_chances(p.tables);
  p.planes = planes.data();
  p.chances = chances.data();
  p.means = means.data();
  p.heads = heads.data();
  run_alone(p, pool);
}

}  // namespace effinfer::ops
