#include "kernels/attention.h"

namespace effinfer::kernels {
namespace {

std::string describe_kv(const KvLayer& kv) {
  return " kv_heads=" + std::to_string(kv.num_kv_heads) +
         " head_dim=" + std::to_string(kv.head_dim) + " kv_dtype=" + std::string(name(kv.dtype));
}

}  // namespace

std::string describe(const AttentionProblem& problem) {
  std::string text = "[attention] heads=" + std::to_string(problem.num_qo_heads) +
                     describe_kv(problem.kv) + " window=" + std::to_string(problem.window_left) +
                     " soft_cap=" + std::to_string(problem.logits_soft_cap);
  if (problem.out_act.cols > 0) {
    text += " out=" + std::string(name(problem.out_act.arithmetic));
  }
  return text;
}

std::string describe(const RopeAppendProblem& problem) {
  return "[rope_append] heads=" + std::to_string(problem.num_qo_heads) + describe_kv(problem.kv) +
         " rope_dims=" + std::to_string(problem.rope_dims) +
         (problem.interleaved ? " interleaved" : "") +
         (problem.q_norm != nullptr ? " q_norm" : "") +
         (problem.k_norm != nullptr ? " k_norm" : "");
}

}  // namespace effinfer::kernels
