// Lists chosen by scores of blocks: queries and keys are pooled to fewer, wider rows, and attention
// scores of these are summed up by block.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "core/float16.h"
#include "effinfer/ops/attention_scores.h"
#include "ops/attention_plan.h"
#include "ops/attention_tensors.h"
#include "ops/index_builder.h"
#include "ops/score_passes.h"

namespace effinfer::ops {
namespace {

// Rows of tokens that the pooled rows are made of.
struct TokenRows {
  const uint8_t* data;
  DType dtype;  // f32, f16, bf16
  int64_t dims;
  int64_t heads;
  int64_t head_stride;  // bytes

  void load(const uint8_t* token, int64_t head, float* to) const {
    const uint8_t* from = token + head * head_stride;
    if (dtype == DType::f32) {
      std::memcpy(to, from, static_cast<size_t>(dims) * sizeof(float));
      return;
    }
    const auto* bits = reinterpret_cast<const uint16_t*>(from);
    for (int64_t d = 0; d < dims; ++d) {
      to[d] = dtype == DType::f16 ? f16_to_f32(bits[d]) : bf16_to_f32(bits[d]);
    }
  }
};

// Float32 rows [groups, heads, dims or stride * dims], a sequence's groups of `size` positions one
// after the other.
struct PooledRows {
  std::vector<int32_t> indptr = {0};  // [S + 1]
  std::vector<int32_t> first;         // [S] positions / size of the first group
  std::unique_ptr<float[]> data;
  int64_t width = 0;
};

struct Pooling {
  int64_t size;       // positions of a group
  bool concatenates;  // else means
  bool reverses;      // the last position first
};

void pool_group(const TokenRows& rows, const Pooling& how, const uint8_t* const* tokens,
                float* out) {
  std::vector<float> one(static_cast<size_t>(rows.dims));
  const int64_t width = how.concatenates ? how.size * rows.dims : rows.dims;
  const int64_t count =
      std::max<int64_t>(1, how.size - std::count(tokens, tokens + how.size, nullptr));
  std::fill(out, out + rows.heads * width, 0.0f);
  for (int64_t head = 0; head < rows.heads; ++head, out += width) {
    for (int64_t i = 0; i < how.size; ++i) {
      if (tokens[i] == nullptr) continue;
      if (how.concatenates) {
        rows.load(tokens[i], head, out + (how.reverses ? how.size - 1 - i : i) * rows.dims);
        continue;
      }
      rows.load(tokens[i], head, one.data());
      for (int64_t d = 0; d < rows.dims; ++d) {
        out[d] += one[static_cast<size_t>(d)] / static_cast<float>(count);
      }
    }
  }
}

// Pools positions [begin(s), kv_len[s]) of every sequence; address(s, position) is a token's row.
template <class Begin, class Address>
PooledRows pool_rows(const TokenRows& rows, const Pooling& how, const std::vector<int32_t>& kv_len,
                     ThreadPool& pool, Begin&& begin, Address&& address) {
  PooledRows out;
  struct Group {
    int32_t sequence;
    int64_t first;  // position
  };
  std::vector<Group> groups;
  for (size_t s = 0; s < kv_len.size(); ++s) {
    const auto sequence = static_cast<int32_t>(s);
    out.first.push_back(static_cast<int32_t>(begin(sequence) / how.size));
    for (int64_t at = out.first.back() * how.size; at < kv_len[s]; at += how.size) {
      groups.push_back({sequence, at});
    }
    out.indptr.push_back(static_cast<int32_t>(groups.size()));
  }
  out.width = how.concatenates ? how.size * rows.dims : rows.dims;
  out.data = std::make_unique_for_overwrite<float[]>(groups.size() *
                                                     static_cast<size_t>(rows.heads * out.width));
  pool.parallel([&](Team& team) {
    std::vector<const uint8_t*> tokens(static_cast<size_t>(how.size));
    team.for_chunks(static_cast<int64_t>(groups.size()), [&](int64_t g) {
      const Group& group = groups[static_cast<size_t>(g)];
      const int64_t end = kv_len[static_cast<size_t>(group.sequence)];
      for (int64_t i = 0; i < how.size; ++i) {
        const int64_t position = group.first + i;
        const bool given = position >= begin(group.sequence) && position < end;
        tokens[static_cast<size_t>(i)] = given ? address(group.sequence, position) : nullptr;
      }
      pool_group(rows, how, tokens.data(), out.data.get() + g * rows.heads * out.width);
    });
  });
  return out;
}

// Scores of blocks [num_qo_heads][blocks of rows][blocks of keys], one sequence after the other.
struct BlockScores {
  std::vector<kernels::ScoreRows> rows;
  std::vector<float> values;
};

class BlockScorer {
 public:
  BlockScorer(const Validator& check, const AttentionGeometry& geometry,
              const AttentionSequences& sequences, const BlockScoreInputs& inputs,
              int32_t block_size)
      : plan_(geometry, sequences), block_size_(block_size) {
    const AttentionTensors tensors(check, plan_, inputs.order);
    q_ = tensors.query_rows("q", inputs.q, geometry.head_dim_qk);
    k_ = tensors.kv_rows("k", inputs.k, geometry.head_dim_qk);
    const bool floats = k_.dtype == DType::f32 || k_.dtype == DType::f16 || k_.dtype == DType::bf16;
    check.expect(floats, "k", "dtype f32, f16 or bf16", name(k_.dtype));
    concatenates_ = inputs.method == BlockMethod::antidiagonal;
    if (concatenates_) {
      const int32_t stride = inputs.stride;
      const bool divides = stride > 0 && block_size % stride == 0;
      check.expect(divides, "stride", "a divisor of block_size " + std::to_string(block_size),
                   std::to_string(stride));
      const int32_t groups = block_size / stride;
      check.expect((groups & (groups - 1)) == 0 && groups <= 256, "stride",
                   "block_size / stride to be a power of two up to 256", std::to_string(groups));
    }
    size_ = concatenates_ ? inputs.stride : block_size;
    sm_scale_ =
        concatenates_ ? inputs.sm_scale / static_cast<float>(inputs.stride) : inputs.sm_scale;
  }

  BlockScores run(ThreadPool& pool) const {
    const PooledRows q = pool_queries(pool);
    const PooledRows k = pool_keys(pool);
    std::vector<int32_t> kv_len;
    BlockScores out;
    int64_t first = 0;
    const int32_t per_block = block_size_ / size_;
    for (size_t s = 0; s < plan_.kv_len.size(); ++s) {
      kv_len.push_back(k.indptr[s + 1] - k.indptr[s]);
      const int64_t keys = (kv_len.back() + per_block - 1) / per_block;
      const int64_t begin = q.first[s] / per_block;
      const int64_t rows = q.indptr[s] == q.indptr[s + 1] ? 0 : keys - begin;
      out.rows.push_back({first, rows * keys, keys});
      first += rows * keys * plan_.geometry.num_qo_heads;
    }
    out.values.resize(static_cast<size_t>(first));
    kernels::AttentionScoresProblem p;
    p.num_qo_heads = plan_.geometry.num_qo_heads;
    p.num_kv_heads = plan_.geometry.num_kv_heads;
    p.q = {reinterpret_cast<const uint8_t*>(q.data.get()), DType::f32,
           static_cast<int32_t>(q.width), p.num_qo_heads * q.width, q.width};
    p.k.data = reinterpret_cast<const uint8_t*>(k.data.get());
    p.k.dims = static_cast<int32_t>(k.width);
    p.k.token_stride = p.num_kv_heads * k.width * 4;
    p.k.head_stride = k.width * 4;
    p.num_sequences = static_cast<int32_t>(kv_len.size());
    p.qo_indptr = q.indptr.data();
    p.kv_indptr = k.indptr.data();
    p.kv_len = kv_len.data();
    p.causal = plan_.geometry.causal;
    p.sm_scale = sm_scale_;
    p.row_block = per_block;
    p.key_block = per_block;
    p.rows = out.rows.data();
    p.out = out.values.data();
    run_score_passes(p, nullptr, pool);
    return out;
  }

 private:
  // Of the first row of a sequence.
  int64_t position(int32_t s) const {
    const auto i = static_cast<size_t>(s);
    return int64_t{plan_.kv_len[i]} - (plan_.qo_indptr[i + 1] - plan_.qo_indptr[i]);
  }

  PooledRows pool_queries(ThreadPool& pool) const {
    const int64_t bytes = dtype_info(q_.dtype).block_bytes;
    const TokenRows rows = {q_.data, q_.dtype, q_.dims, plan_.geometry.num_qo_heads,
                            q_.head_stride * bytes};
    return pool_rows(
        rows, {size_, concatenates_, true}, plan_.kv_len, pool,
        [&](int32_t s) { return position(s); },
        [&](int32_t s, int64_t at) {
          const int64_t row = plan_.qo_indptr[static_cast<size_t>(s)] + at - position(s);
          return q_.data + row * q_.row_stride * bytes;
        });
  }

  PooledRows pool_keys(ThreadPool& pool) const {
    const TokenRows rows = {k_.data, k_.dtype, k_.dims, plan_.geometry.num_kv_heads,
                            k_.head_stride};
    return pool_rows(
        rows, {size_, concatenates_, false}, plan_.kv_len, pool, [](int32_t) { return 0; },
        [&](int32_t s, int64_t at) {
          const int64_t first = plan_.kv_indptr[static_cast<size_t>(s)];
          if (!plan_.paged) return k_.data + (first + at) * k_.token_stride;
          const int64_t size = plan_.geometry.page_size;
          const int32_t page = plan_.kv_indices[static_cast<size_t>(first + at / size)];
          return k_.data + page * k_.page_stride + at % size * k_.token_stride;
        });
  }

  const AttentionPlan::Impl plan_;
  const int32_t block_size_;
  kernels::QueryRows q_;
  kernels::KvRows k_;
  bool concatenates_ = false;
  int64_t size_ = 1;
  float sm_scale_ = 1.0f;
};

}  // namespace

BlockLists block_score_lists(const IndexRows& rows, const AttentionGeometry& geometry,
                             const AttentionSequences& sequences, const BlockScoreInputs& inputs,
                             ThreadPool& pool) {
  const Validator check("block_score_index");
  const IndexBuilder builder(check, rows);
  check_top(check, "num_blocks", inputs.top);
  const BlockScores scores =
      BlockScorer(check, geometry, sequences, inputs, rows.block_size).run(pool);
  const int64_t group = geometry.num_qo_heads / geometry.num_kv_heads;
  return builder.build(pool, [&, group](int64_t s, int32_t kv_head) {
    const kernels::ScoreRows& at = scores.rows[static_cast<size_t>(s)];
    const float* first = scores.values.data() + at.first + kv_head * group * at.head_stride;
    const std::vector<RowBlock> blocks = builder.blocks(s);
    const int64_t origin = blocks.empty() ? 0 : blocks[0].index;
    const int64_t size = rows.block_size;
    return [=, &builder, &inputs](const RowBlock& block, TokenSet& set) {
      const int64_t seen = (builder.limit(s, block) + size - 1) / size;
      for (int64_t i = 0; i < group; ++i) {
        const float* row = first + i * at.head_stride + (block.index - origin) * at.block_stride;
        for (const int32_t j : choose_top(row, seen, inputs.top)) {
          set.add(j * size, (j + 1) * size);
        }
      }
    };
  });
}

}  // namespace effinfer::ops
