// Bounds of pages in one pass over the keys, which memory limits, and sums of a product for each
// dimension, added in the order of the dimensions.
#include "ops/page_bounds.h"

#include <algorithm>
#include <limits>

#include "cpu/float_elements.h"
#include "cpu/level.h"

namespace effinfer::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class Element>
void bound_page(const ops::PageBoundsProblem& p, const ops::KeyPage& page) {
  for (int64_t head = 0; head < p.num_kv_heads; ++head) {
    const int64_t at = (page.place * p.num_kv_heads + head) * p.k.dims;
    float* least = p.least + at;
    float* most = p.most + at;
    std::fill_n(least, p.k.dims, kInfinity);
    std::fill_n(most, p.k.dims, -kInfinity);
    const uint8_t* row = page.first + head * p.k.head_stride;
    for (int64_t token = 0; token < page.tokens; ++token, row += p.k.token_stride) {
      const auto* key = reinterpret_cast<const typename Element::Stored*>(row);
      for (int64_t d = 0; d < p.k.dims; ++d) {
        const float x = Element::load(key[d]);
        least[d] = std::min(least[d], x);
        most[d] = std::max(most[d], x);
      }
    }
  }
}

template <class Element>
float highest_logit(const ops::PageScoresProblem& p, int64_t row, int64_t head, int64_t place) {
  const uint8_t* data = p.q.data + (row * p.q.row_stride + head * p.q.head_stride) *
                                       static_cast<int64_t>(sizeof(typename Element::Stored));
  const auto* x = reinterpret_cast<const typename Element::Stored*>(data);
  const int64_t kv_head = head / (p.num_qo_heads / p.num_kv_heads);
  const int64_t at = (place * p.num_kv_heads + kv_head) * p.q.dims;
  float sum = 0.0f;
  for (int64_t d = 0; d < p.q.dims; ++d) {
    const float value = Element::load(x[d]);
    sum += std::max(value * p.least[at + d], value * p.most[at + d]);
  }
  return sum;
}

template <class Element>
void score_pages(const ops::PageScoresProblem& p, int64_t s, int64_t head) {
  for (int64_t i = p.starts[s]; i < p.starts[s + 1]; ++i) {
    float best = -kInfinity;
    for (int64_t row = p.qo_indptr[s]; row < p.qo_indptr[s + 1]; ++row) {
      best = std::max(best, highest_logit<Element>(p, row, head, p.pages[i].place));
    }
    p.out[head * p.starts[p.num_sequences] + i] = best;
  }
}

}  // namespace

template <>
void run<Level::portable>(const ops::PageBoundsProblem& p, Team& team) {
  with_row_elements(p.k.dtype, [&]<class Element>() {
    team.for_chunks(p.num_pages, [&](int64_t i) { bound_page<Element>(p, p.pages[i]); });
  });
}

template <>
void run<Level::portable>(const ops::PageScoresProblem& p, Team& team) {
  with_row_elements(p.q.dtype, [&]<class Element>() {
    team.for_chunks(p.num_qo_heads * p.num_sequences, [&](int64_t task) {
      score_pages<Element>(p, task % p.num_sequences, task / p.num_sequences);
    });
  });
}

}  // namespace effinfer::cpu
