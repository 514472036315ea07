#include "ops/page_bounds.h"

#include <algorithm>
#include <string>

#include "effinfer/ops/token_index.h"
#include "ops/attention_plan.h"
#include "ops/attention_tensors.h"
#include "ops/describe.h"
#include "ops/registry.h"
#include "ops/workplace.h"

namespace effinfer::ops {
namespace {

// The pages of every sequence, in order.
std::vector<KeyPage> pages_of(const AttentionPlan::Impl& plan, const KvRows* k) {
  std::vector<KeyPage> pages;
  const int64_t size = plan.geometry.page_size;
  for (size_t s = 0; s < plan.kv_len.size(); ++s) {
    for (int64_t begin = 0; begin < plan.kv_len[s]; begin += size) {
      const int64_t at = plan.kv_indptr[s] + (plan.paged ? begin / size : begin);
      KeyPage page = {nullptr, std::min<int64_t>(size, plan.kv_len[s] - begin),
                      static_cast<int64_t>(pages.size()), static_cast<int64_t>(s)};
      if (plan.paged) page.place = plan.kv_indices[static_cast<size_t>(at)];
      if (k != nullptr) {
        page.first = k->data + (plan.paged ? page.place * k->page_stride : at * k->token_stride);
      }
      pages.push_back(page);
    }
  }
  return pages;
}

int64_t num_places(const AttentionPlan::Impl& plan, const std::vector<KeyPage>& pages) {
  return plan.paged ? plan.num_kv_rows : static_cast<int64_t>(pages.size());
}

}  // namespace

std::string describe(const PageBoundsProblem& problem) {
  return "[page_bounds]" + field("pages", problem.num_pages) +
         field("kv_heads", problem.num_kv_heads) + field("head_dim", problem.k.dims) +
         " dtype=" + std::string(name(problem.k.dtype));
}

std::string describe(const PageScoresProblem& problem) {
  return "[page_scores]" + field("pages", problem.num_pages) +
         field("heads", problem.num_qo_heads) + field("kv_heads", problem.num_kv_heads) +
         field("head_dim", problem.q.dims) + " dtype=" + std::string(name(problem.q.dtype));
}

const char* rejects(const PageBoundsProblem& problem) {
  return is_row_type(problem.k.dtype) ? nullptr : "k must be f32, f16 or bf16";
}

Cost cost(const PageBoundsProblem& problem) {
  const int64_t width = int64_t{problem.num_kv_heads} * problem.k.dims;
  int64_t tokens = 0;
  for (int64_t i = 0; i < problem.num_pages; ++i) tokens += problem.pages[i].tokens;
  return {width * (tokens * dtype_info(problem.k.dtype).block_bytes + problem.num_pages * 8),
          2 * width * tokens};
}

Cost cost(const PageScoresProblem& problem) {
  Cost cost;
  for (int64_t s = 0; s < problem.num_sequences; ++s) {
    const int64_t pages = problem.starts[s + 1] - problem.starts[s];
    const int64_t rows = int64_t{problem.qo_indptr[s + 1]} - problem.qo_indptr[s];
    cost.bytes += pages * problem.num_kv_heads * problem.q.dims * 8;
    cost.ops += 4 * pages * rows * problem.num_qo_heads * problem.q.dims;
  }
  return cost;
}

Dims page_bounds_dims(const AttentionGeometry& g, const AttentionSequences& sequences) {
  const AttentionPlan::Impl plan(g, sequences);
  return {2, num_places(plan, pages_of(plan, nullptr)), g.num_kv_heads, g.head_dim_qk};
}

void page_bounds(const AttentionGeometry& g, const AttentionSequences& sequences,
                 const StridedView& k, KvOrder order, float* out, const Executor& executor) {
  const Validator check("page_bounds", executor.device());
  const AttentionPlan::Impl plan(g, sequences);
  const KvRows rows = AttentionTensors(check, plan, order).kv_rows("k", k, g.head_dim_qk);
  check.row_type("k", rows.dtype);
  const std::vector<KeyPage> pages = pages_of(plan, &rows);
  const int64_t numbers = num_places(plan, pages) * g.num_kv_heads * g.head_dim_qk;
  Workplace place(executor);
  place.zero(out, static_cast<size_t>(2 * numbers) * sizeof(float));
  PageBoundsProblem problem;
  problem.pages = place.place(pages);
  problem.num_pages = static_cast<int64_t>(pages.size());
  problem.k = rows;
  problem.num_kv_heads = g.num_kv_heads;
  problem.least = out;
  problem.most = out + numbers;
  run_alone(problem, executor);
}

Dims page_scores_dims(const AttentionGeometry& g, const AttentionSequences& sequences) {
  const AttentionPlan::Impl plan(g, sequences);
  return {g.num_qo_heads, static_cast<int64_t>(pages_of(plan, nullptr).size())};
}

void page_scores(const AttentionGeometry& g, const AttentionSequences& sequences,
                 const StridedView& q, const TensorView& bounds, float* out,
                 const Executor& executor) {
  const Validator check("topk_pages", executor.device());
  const AttentionPlan::Impl plan(g, sequences);
  const QueryRows rows =
      AttentionTensors(check, plan, KvOrder::nhd).query_rows("q", q, g.head_dim_qk);
  const std::vector<KeyPage> pages = pages_of(plan, nullptr);
  check.dtype("bounds", bounds, DType::f32);
  check.rank("bounds", bounds, 4);
  const int64_t places = std::max(num_places(plan, pages), bounds.dims[1]);
  check.shape("bounds", bounds, {2, places, g.num_kv_heads, g.head_dim_qk});
  std::vector<int64_t> starts = {0};
  for (const int32_t length : plan.kv_len) {
    starts.push_back(starts.back() + (int64_t{length} + g.page_size - 1) / g.page_size);
  }
  Workplace place(executor);
  PageScoresProblem problem;
  problem.q = rows;
  problem.num_qo_heads = g.num_qo_heads;
  problem.num_kv_heads = g.num_kv_heads;
  problem.num_sequences = plan.num_sequences();
  problem.qo_indptr = place.place(plan.qo_indptr);
  problem.starts = place.place(starts);
  problem.pages = place.place(pages);
  problem.num_pages = starts.back();
  problem.least = static_cast<const float*>(bounds.data);
  problem.most = problem.least + places * g.num_kv_heads * g.head_dim_qk;
  problem.out = out;
  run_alone(problem, executor);
}

}  // namespace effinfer::ops
