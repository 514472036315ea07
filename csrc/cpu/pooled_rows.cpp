// Means add the shares of the tokens in their order; memory limits these loops.
#include "ops/pooled_rows.h"

#include <algorithm>

#include "cpu/float_elements.h"
#include "cpu/level.h"

namespace effinfer::cpu {
namespace {

template <class Element>
void pool_group(const ops::PoolRowsProblem& p, int64_t group) {
  const uint8_t* const* tokens = p.tokens + group * p.group_size;
  const int64_t count =
      std::max<int64_t>(1, p.group_size - std::count(tokens, tokens + p.group_size, nullptr));
  float* out = p.out + group * p.heads * p.width();
  std::fill_n(out, p.heads * p.width(), 0.0f);
  for (int64_t head = 0; head < p.heads; ++head, out += p.width()) {
    for (int64_t i = 0; i < p.group_size; ++i) {
      if (tokens[i] == nullptr) continue;
      const auto* row =
          reinterpret_cast<const typename Element::Stored*>(tokens[i] + head * p.head_stride);
      if (p.concatenates) {
        float* to = out + (p.reverses ? p.group_size - 1 - i : i) * p.dims;
        for (int64_t d = 0; d < p.dims; ++d) to[d] = Element::load(row[d]);
      } else {
        for (int64_t d = 0; d < p.dims; ++d) {
          out[d] += Element::load(row[d]) / static_cast<float>(count);
        }
      }
    }
  }
}

}  // namespace

template <>
void run<Level::portable>(const ops::PoolRowsProblem& p, Team& team) {
  with_row_elements(p.dtype, [&]<class Element>() {
    team.for_chunks(p.num_groups, [&](int64_t group) { pool_group<Element>(p, group); });
  });
}

}  // namespace effinfer::cpu
