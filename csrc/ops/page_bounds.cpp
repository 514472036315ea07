// What the keys of pages are bounded by, and the logits that follow (Quest, Tang et al.,
// arXiv:2406.10774, section 3.3).
#include <algorithm>
#include <limits>
#include <string>

#include "core/float16.h"
#include "effinfer/ops/token_index.h"
#include "ops/attention_plan.h"
#include "ops/attention_tensors.h"

namespace effinfer::ops {
namespace {

struct Page {
  const uint8_t* first;  // row of its first token, in the first head
  int64_t tokens;
  int64_t place;  // in the bounds
};

// The pages of every sequence, in order.
std::vector<Page> pages_of(const AttentionPlan::Impl& plan, const KvRows* k) {
  std::vector<Page> pages;
  const int64_t size = plan.geometry.page_size;
  for (size_t s = 0; s < plan.kv_len.size(); ++s) {
    for (int64_t begin = 0; begin < plan.kv_len[s]; begin += size) {
      const int64_t at = plan.kv_indptr[s] + (plan.paged ? begin / size : begin);
      Page page = {nullptr, std::min<int64_t>(size, plan.kv_len[s] - begin),
                   static_cast<int64_t>(pages.size())};
      if (plan.paged) page.place = plan.kv_indices[static_cast<size_t>(at)];
      if (k != nullptr) {
        page.first = k->data + (plan.paged ? page.place * k->page_stride : at * k->token_stride);
      }
      pages.push_back(page);
    }
  }
  return pages;
}

int64_t num_places(const AttentionPlan::Impl& plan, const std::vector<Page>& pages) {
  return plan.paged ? plan.num_kv_rows : static_cast<int64_t>(pages.size());
}

float element(const uint8_t* row, DType dtype, int64_t d) {
  if (dtype == DType::f32) return reinterpret_cast<const float*>(row)[d];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[d];
  return dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

void check_floats(const Validator& check, std::string_view argument, DType dtype) {
  check.expect(dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16, argument,
               "dtype f32, f16 or bf16", name(dtype));
}

}  // namespace

std::vector<float> page_bounds(const AttentionGeometry& geometry,
                               const AttentionSequences& sequences, const StridedView& k,
                               KvOrder order, ThreadPool& pool, Dims& dims) {
  const Validator check("page_bounds");
  const AttentionGeometry& g = geometry;
  const AttentionPlan::Impl plan(g, sequences);
  const KvRows rows = AttentionTensors(check, plan, order).kv_rows("k", k, g.head_dim_qk);
  check_floats(check, "k", rows.dtype);
  const std::vector<Page> pages = pages_of(plan, &rows);
  const int64_t places = num_places(plan, pages);
  dims = {2, places, g.num_kv_heads, g.head_dim_qk};
  const int64_t width = int64_t{g.num_kv_heads} * g.head_dim_qk;
  std::vector<float> bounds(static_cast<size_t>(2 * places * width));
  pool.parallel([&](Team& team) {
    team.for_chunks(static_cast<int64_t>(pages.size()), [&](int64_t i) {
      const Page& page = pages[static_cast<size_t>(i)];
      for (int64_t at = 0; at < width; ++at) {
        const uint8_t* head = page.first + at / g.head_dim_qk * rows.head_stride;
        float least = std::numeric_limits<float>::infinity();
        float most = -least;
        for (int64_t token = 0; token < page.tokens; ++token) {
          const float x = element(head + token * rows.token_stride, rows.dtype, at % g.head_dim_qk);
          least = std::min(least, x);
          most = std::max(most, x);
        }
        bounds[static_cast<size_t>(page.place * width + at)] = least;
        bounds[static_cast<size_t>((places + page.place) * width + at)] = most;
      }
    });
  });
  return bounds;
}

std::vector<float> page_scores(const AttentionGeometry& g, const AttentionSequences& sequences,
                               const StridedView& q, const TensorView& bounds, ThreadPool& pool,
                               Dims& dims) {
  const Validator check("topk_pages");
  const AttentionPlan::Impl plan(g, sequences);
  const QueryRows rows =
      AttentionTensors(check, plan, KvOrder::nhd).query_rows("q", q, g.head_dim_qk);
  const std::vector<Page> pages = pages_of(plan, nullptr);
  check.dtype("bounds", bounds, DType::f32);
  check.rank("bounds", bounds, 4);
  const int64_t places = std::max(num_places(plan, pages), bounds.dims[1]);
  check.shape("bounds", bounds, {2, places, g.num_kv_heads, g.head_dim_qk});
  dims = {g.num_qo_heads, static_cast<int64_t>(pages.size())};
  std::vector<float> scores(static_cast<size_t>(dims.num_elements()));
  const auto* least = static_cast<const float*>(bounds.data);
  const int64_t width = int64_t{g.num_kv_heads} * g.head_dim_qk;
  const float* most = least + places * width;
  std::vector<int64_t> starts = {0};  // of the sequences, in pages
  for (const int32_t length : plan.kv_len) {
    starts.push_back(starts.back() + (int64_t{length} + g.page_size - 1) / g.page_size);
  }
  const int64_t bytes = dtype_info(rows.dtype).block_bytes;
  const auto score = [&](int64_t row, int64_t head, int64_t place) {
    const uint8_t* x = rows.data + (row * rows.row_stride + head * rows.head_stride) * bytes;
    const int64_t at = place * width + head / (g.num_qo_heads / g.num_kv_heads) * g.head_dim_qk;
    float sum = 0.0f;
    for (int64_t d = 0; d < g.head_dim_qk; ++d) {
      const float value = element(x, rows.dtype, d);
      sum += std::max(value * least[at + d], value * most[at + d]);
    }
    return sum;
  };
  const auto num_sequences = static_cast<int64_t>(plan.kv_len.size());
  pool.parallel([&](Team& team) {
    team.for_chunks(g.num_qo_heads * num_sequences, [&](int64_t task) {
      const auto s = static_cast<size_t>(task % num_sequences);
      const int64_t head = task / num_sequences;
      for (int64_t i = starts[s]; i < starts[s + 1]; ++i) {
        float best = -std::numeric_limits<float>::infinity();
        for (int64_t row = plan.qo_indptr[s]; row < plan.qo_indptr[s + 1]; ++row) {
          best = std::max(best, score(row, head, pages[static_cast<size_t>(i)].place));
        }
        scores[static_cast<size_t>(head * starts.back() + i)] = best;
      }
    });
  });
  return scores;
}

}  // namespace effinfer::ops
