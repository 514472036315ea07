// The row sampling driver: a member of the team takes whole rows.
#include "ops/row_sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/register.h"
#include "cpu/row_distribution.h"

namespace effinfer::cpu {
namespace {

using ops::ChainSpeculationProblem;
using ops::RowResult;
using ops::RowSamplingProblem;
using ops::RowSource;
using ops::RowStatus;
using ops::TokenBitmaskProblem;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// The draw of an output after the draws that accept or reject its drafts.
constexpr uint32_t kFinalDraw = 0;

const void* row_at(const void* x, DType dtype, int64_t row, int64_t cols) {
  const size_t size = dtype == DType::f32 ? 4 : 2;
  return static_cast<const std::byte*>(x) + static_cast<size_t>(row * cols) * size;
}
void* row_at(void* x, DType dtype, int64_t row, int64_t cols) {
  return const_cast<void*>(row_at(static_cast<const void*>(x), dtype, row, cols));
}

class RowRunner {
 public:
  RowRunner(const RowSamplingProblem& problem, const RowMath& math, void* scratch)
      : p_(problem), math_(math), left_(math, scratch, problem.vocab) {
    const size_t own = RowDistribution::scratch_bytes(problem.vocab);
    dense_ = reinterpret_cast<float*>(static_cast<std::byte*>(scratch) + own);
  }

  void run(int64_t row) {
    const RowStatus status = filter(row);
    p_.statuses[row] = status;
    switch (p_.result) {
      case RowResult::sample:
        p_.set_sample(row,
                      status == RowStatus::ok ? left_.draw(p_.random.uniform(row, kFinalDraw)) : 0);
        break;
      case RowResult::weights:
        write_weights(row, status == RowStatus::ok);
        break;
      case RowResult::logits:
        write_logits(row, status == RowStatus::ok);
        break;
      case RowResult::top:
        if (status == RowStatus::ok) write_top(row);
        break;
    }
  }

 private:
  RowStatus filter(int64_t row) {
    const void* x = row_at(p_.x, p_.dtype, p_.source_of(row), p_.vocab);
    const int64_t k = p_.top_k_of(row);
    if (p_.source == RowSource::logits) {
      RowStatus status = left_.from_logits(x, p_.dtype, p_.vocab, p_.joint ? 0 : k);
      const bool weighs = p_.result == RowResult::sample || p_.result == RowResult::weights;
      if (status == RowStatus::ok && weighs) status = left_.check_logits();
      if (status != RowStatus::ok) return status;
      if (!p_.joint && k > 0) left_.keep_top_k(k);
      if (!weighs) return status;
      left_.to_weights(p_.temperature[row]);
    } else {
      const RowStatus status = left_.from_weights(x, p_.dtype, p_.vocab);
      if (status != RowStatus::ok) return status;
      if (!p_.joint && k > 0) left_.keep_top_k(k);
    }
    left_.keep_top_p(p_.top_p[row]);
    if (p_.joint && k > 0) left_.keep_top_k(k);
    if (p_.min_p[row] > 0.0f) left_.keep_min_p(p_.min_p[row]);
    return RowStatus::ok;
  }

  // The row to write to: that of the output, or one to narrow from.
  float* dense_row(int64_t row) {
    void* out = row_at(p_.out, p_.out_dtype, row, p_.vocab);
    return p_.out_dtype == DType::f32 ? static_cast<float*>(out) : dense_;
  }
  void finish_row(const float* dense, int64_t row) {
    if (p_.out_dtype == DType::f32) return;
    math_.narrow(dense, p_.out_dtype, p_.vocab, row_at(p_.out, p_.out_dtype, row, p_.vocab));
  }

  void write_weights(int64_t row, bool ok) {
    float* out = dense_row(row);
    if (!ok) {
      std::fill(out, out + p_.vocab, 0.0f);
    } else {
      left_.write_probabilities(out);
    }
    finish_row(out, row);
  }

  void write_logits(int64_t row, bool ok) {
    float* out = dense_row(row);
    const float temperature = p_.temperature[row];
    if (ok && left_.ids() == nullptr) {
      const float* x = left_.row();
      for (int64_t i = 0; i < p_.vocab; ++i) out[i] = x[i] / temperature;
    } else {
      std::fill(out, out + p_.vocab, ok ? -kInfinity : 0.0f);
      const int64_t kept = ok ? left_.size() : 0;
      for (int64_t i = 0; i < kept; ++i) out[left_.ids()[i]] = left_.values()[i] / temperature;
    }
    finish_row(out, row);
  }

  void write_top(int64_t row) {
    const int64_t k = p_.top_k_of(row);
    int64_t* ids = p_.ids + row * k;
    for (int64_t i = 0; i < k; ++i) ids[i] = left_.ids() == nullptr ? i : left_.ids()[i];
    if (p_.sorted) {
      const float* x = left_.row();
      std::sort(ids, ids + k,
                [x](int64_t a, int64_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
    }
    for (int64_t i = 0; i < k; ++i) dense_[i] = left_.row()[ids[i]];
    math_.narrow(dense_, p_.out_dtype, k, row_at(p_.out, p_.out_dtype, row, k));
  }

  const RowSamplingProblem& p_;
  const RowMath& math_;
  RowDistribution left_;
  float* dense_;  // [vocab], for outputs that are not float32
};

// One row of drafts. Each draft has a uniform number of its own, whatever happens before it.
RowStatus speculate(const ChainSpeculationProblem& p, int64_t row, RowDistribution& left) {
  const float* targets = p.target_probs + row * (p.drafts + 1) * p.vocab;
  const float* drafts = p.draft_probs + row * p.drafts * p.vocab;
  const int32_t* ids = p.draft_ids + row * p.drafts;
  int32_t* tokens = p.tokens + row * (p.drafts + 1);
  std::fill(tokens, tokens + p.drafts + 1, -1);
  int64_t emitted = p.drafts;
  int32_t accepted = 0;
  for (int64_t i = 0; i < p.drafts; ++i) {
    const auto target = static_cast<double>(targets[i * p.vocab + ids[i]]);
    const auto draft = static_cast<double>(drafts[i * p.vocab + ids[i]]);
    if (std::isnan(target) || std::isnan(draft)) return RowStatus::nan;
    // Accepted with probability min(1, target / draft); a draft that could not be drawn is not.
    if (p.random.uniform(row, static_cast<uint32_t>(i + 1)) * draft < target) {
      ++accepted;
    } else if (emitted == p.drafts) {
      emitted = i;
    }
  }
  const float* target = targets + emitted * p.vocab;
  const RowStatus status = emitted == p.drafts
                               ? left.from_weights(target, DType::f32, p.vocab)
                               : left.from_excess(target, drafts + emitted * p.vocab, p.vocab);
  if (status != RowStatus::ok) return status;
  std::copy(ids, ids + emitted, tokens);
  tokens[emitted] = left.draw(p.random.uniform(row, kFinalDraw));
  p.accepted[row] += accepted;
  p.emitted[row] += static_cast<int32_t>(emitted);
  return status;
}

void share(const RowSamplingProblem& problem, Team& team, const RowMath& math) {
  RowRunner runner(problem, math, team.scratch());
  team.for_chunks(problem.rows, [&](int64_t row) { runner.run(row); });
}

void share(const ChainSpeculationProblem& problem, Team& team, const RowMath& math) {
  RowDistribution left(math, team.scratch(), problem.vocab);
  team.for_chunks(problem.rows,
                  [&](int64_t row) { problem.statuses[row] = speculate(problem, row, left); });
}

void share(const TokenBitmaskProblem& problem, Team& team, const RowMath& math) {
  const int64_t words = (problem.vocab + 31) / 32;
  team.for_chunks(problem.rows, [&](int64_t i) {
    const int64_t row = problem.row_of(i);
    math.mask(row_at(problem.logits, problem.dtype, row, problem.vocab), problem.dtype,
              problem.vocab, problem.bitmask + row * words);
  });
}

// The distribution, and a row of results before they are narrowed.
size_t scratch_bytes(const RowSamplingProblem& p) {
  return RowDistribution::scratch_bytes(p.vocab) + static_cast<size_t>(p.vocab) * sizeof(float);
}
size_t scratch_bytes(const ChainSpeculationProblem& p) {
  return RowDistribution::scratch_bytes(p.vocab);
}
size_t scratch_bytes(const TokenBitmaskProblem&) {
  return 0;
}

template <class Problem>
void add(const std::string& op) {
  for_levels<Level::portable, Level::avx2, Level::avx512>([&]<Level kLevel>() {
    ops::mutable_table<Problem>().add(
        {op + "." + std::string(name(kLevel)), isa_of(kLevel), rejects_problem<Problem>,
         [](const Problem& p, Team& team) { share(p, team, kernels<kLevel, RowMath>()); },
         [](const Problem& p) { return scratch_bytes(p); }});
  });
}

}  // namespace

void register_row_sampling() {
  add<RowSamplingProblem>("row_sampling");
  add<ChainSpeculationProblem>("chain_speculation");
  add<TokenBitmaskProblem>("token_bitmask");
}

}  // namespace effinfer::cpu
