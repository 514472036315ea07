// q = [rms_norm] [rope](q0); k = [rms_norm] [rope](k0); kv = kv_append(k, v); attention(q, kv)
//   ->  q, kv = rope_append(q0, k0, v[, table][, q_norm][, k_norm]); attention(q, kv)
//
// A head is normed, rotated and written to its page while it is in registers. Norms are of heads
// (groups = heads); what q and k share (rotation, eps) must agree.
#include "compiler/passes.h"
#include "compiler/rewriter.h"

namespace effinfer::compiler {
namespace {

// What stands between a projection and its use.
struct Chain {
  ValueId source;  // the projection
  int rope = -1;   // nodes, -1: none
  int norm = -1;
};

bool is_read_by(const Rewriter& rewriter, ValueId value, std::string_view consumer) {
  if (consumer == "attention") return rewriter.attention_of(value) >= 0;
  return rewriter.only_user(value, consumer) >= 0;
}

// Walks up from a value that `consumer` reads.
Chain find_chain(const Rewriter& rewriter, ValueId value, std::string_view consumer,
                 int64_t heads) {
  Chain chain{value};
  const int rope = rewriter.producer(value);
  if (rewriter.is(rope, "rope") && is_read_by(rewriter, value, consumer)) {
    chain.rope = rope;
    chain.source = rewriter.node(rope).inputs[0];
    consumer = "rope";
  }
  const int norm = rewriter.producer(chain.source);
  if (rewriter.is(norm, "rms_norm") && is_read_by(rewriter, chain.source, consumer) &&
      rewriter.node(norm).get_int("groups") == heads) {
    chain.norm = norm;
    chain.source = rewriter.node(norm).inputs[0];
  }
  return chain;
}

bool agree(const Rewriter& rewriter, const Chain& q, const Chain& k) {
  if ((q.rope < 0) != (k.rope < 0)) return false;
  if (q.rope >= 0) {
    const Node& a = rewriter.node(q.rope);
    const Node& b = rewriter.node(k.rope);
    if (a.inputs[1] != b.inputs[1] || a.get_bool("interleaved") != b.get_bool("interleaved")) {
      return false;
    }
  }
  return q.norm < 0 || k.norm < 0 ||
         rewriter.node(q.norm).get_float("eps") == rewriter.node(k.norm).get_float("eps");
}

Node make_fused(const Rewriter& rewriter, const Node& attention, const Node& append, const Chain& q,
                const Chain& k) {
  Node fused{"rope_append",
             {q.source, k.source, append.inputs[1]},
             {},
             {attention.inputs[0], append.outputs[0]}};
  for (const char* key : {"layer", "heads", "kv_heads", "head_dim"}) {
    fused.attributes[key] = attention.attributes.find(key)->second;
  }
  fused.attributes["rope"] = q.rope >= 0;
  fused.attributes["interleaved"] = q.rope >= 0 && rewriter.node(q.rope).get_bool("interleaved");
  fused.attributes["q_norm"] = q.norm >= 0;
  fused.attributes["k_norm"] = k.norm >= 0;
  fused.attributes["eps"] = 0.0;
  if (q.rope >= 0) fused.inputs.push_back(rewriter.node(q.rope).inputs[1]);
  for (const int norm : {q.norm, k.norm}) {
    if (norm < 0) continue;
    fused.inputs.push_back(rewriter.node(norm).inputs[1]);
    fused.attributes["eps"] = rewriter.node(norm).get_float("eps");
  }
  return fused;
}

void fuse(Rewriter& rewriter, int index) {
  const Node attention = rewriter.node(index);
  const int append_index = rewriter.producer(attention.inputs[1]);
  if (!rewriter.is(append_index, "kv_append")) return;
  const Node append = rewriter.node(append_index);
  const Chain q =
      find_chain(rewriter, attention.inputs[0], "attention", attention.get_int("heads"));
  const Chain k = find_chain(rewriter, append.inputs[0], "kv_append", append.get_int("heads"));
  // Without any work on q there is nothing to fuse: kv_append is the whole operator.
  if ((q.rope < 0 && q.norm < 0) || !agree(rewriter, q, k)) return;
  // The fused node stands where both halves are known; the layer may be read by others only later.
  const int q_index = q.rope >= 0 ? q.rope : q.norm;
  const int place = std::max(append_index, q_index);
  if (rewriter.users(append.outputs[0]).front() <= place) return;

  Node fused = make_fused(rewriter, attention, append, q, k);
  for (const int old : {q.rope, q.norm, k.rope, k.norm, append_index}) {
    if (old >= 0) rewriter.erase(old);
  }
  rewriter.replace(place, std::move(fused));
}

}  // namespace

void fuse_rope_append(Graph& graph, const CompileOptions&) {
  Rewriter rewriter(graph);
  for (int index = 0; index < rewriter.size(); ++index) {
    if (rewriter.is(index, "attention")) fuse(rewriter, index);
  }
  rewriter.finish();
}

}  // namespace effinfer::compiler
