#include "executor/places.h"

#include <algorithm>

namespace effinfer::executor {
namespace {

// Of a GPU, in whose memory the rows of a step lie by name: those of one; else none.
std::span<const ops::MassRows> rows_of(const Step& step, std::string_view name) {
  if (step.mass_rows == nullptr) return {};
  const std::span<const ScoredRows> scored = step.batch->scored;
  const auto own = std::ranges::equal_range(scored, name, {}, &ScoredRows::name);
  return {step.mass_rows + (own.begin() - scored.begin()), own.size()};
}

}  // namespace

float* Floats::at(const Step& step) const {
  if (own >= 0 && step.own != nullptr) return reinterpret_cast<float*>(step.own + own);
  return fixed != nullptr ? fixed : step.logits;
}

ops::Operand OperandPlace::at(const Step& step, int64_t rows) const {
  ops::Operand view = largest;
  view.rows = rows;
  if (own >= 0 && step.own != nullptr) view.data = step.own + own;
  return view;
}

bool EmbeddingPlaces::fill(ops::EmbeddingProblem& p, const Step& step) const {
  p.ids = ids.at(step);
  p.rows = step.count(rows);
  p.out = out.at(step);
  return p.rows > 0;
}

bool SelectRowsPlaces::fill(ops::SelectRowsProblem& p, const Step& step) const {
  p.x = x.at(step);
  p.rows = ids.at(step);
  p.num_rows = step.count(rows);
  p.out = out.at(step);
  return p.num_rows > 0;
}

bool UnaryPlaces::fill(ops::UnaryProblem& p, const Step& step) const {
  p.x = x.at(step);
  p.out = out.at(step);
  p.rows = step.count(rows);
  return p.rows > 0;
}

bool BinaryPlaces::fill(ops::BinaryProblem& p, const Step& step) const {
  p.a = a.at(step);
  p.b = b.at(step);
  p.out = out.at(step);
  p.size = step.count(rows) * cols;
  return p.size > 0;
}

bool RmsNormPlaces::fill(ops::RmsNormProblem& p, const Step& step) const {
  p.x.data = x.at(step);
  p.rows = step.count(rows);
  if (sum) {
    p.add_to.data = sum->add_to.at(step);
    p.sum_out.data = sum->out.at(step);
  }
  if (out_operand) {
    p.out_operand = out_operand->at(step, p.rows);
  } else {
    p.out.data = out.at(step);
  }
  return p.rows > 0;
}

bool ToOperandPlaces::fill(ops::ToOperandProblem& p, const Step& step) const {
  p.x = x.at(step);
  p.out = out.at(step, step.count(rows));
  return p.out.rows > 0;
}

bool MatmulPlaces::fill(ops::MatmulProblem& p, const Step& step) const {
  const int64_t num_rows = step.count(rows);
  p.x = x.at(step, num_rows);
  if (is_head) {
    p.top = step.top;
    p.top_k = step.top_k;
  }
  if (out_operand) p.out_operand = out_operand->at(step, num_rows);
  for (size_t i = 0; i < num_written; ++i) {
    p.parts[i].out = parts[i].out.at(step);
    if (parts[i].residual) p.parts[i].residual = parts[i].residual->at(step);
  }
  return num_rows > 0;
}

bool RopeTablePlaces::fill(ops::RopeTableProblem& p, const Step& step) const {
  p.positions = positions.at(step);
  p.rows = step.count(rows);
  p.batch = step.layout;
  p.out = out.at(step);
  return p.rows > 0;
}

bool RopePlaces::fill(ops::RopeProblem& p, const Step& step) const {
  p.x.data = x.at(step);
  p.cos_sin = table.at(step);
  p.out.data = out.at(step);
  p.rows = step.count(rows);
  return p.rows > 0;
}

bool KvAppendPlaces::fill(ops::RopeAppendProblem& p, const Step& step) const {
  p.k = k.at(step);
  p.v = v.at(step);
  p.kv = step.kv_layers[layer];
  p.batch = step.layout_of(layer);
  return true;
}

bool RopeAppendPlaces::fill(ops::RopeAppendProblem& p, const Step& step) const {
  p.q = q.at(step);
  p.q_out = q_out.at(step);
  if (table) p.cos_sin = table->at(step);
  return kv.fill(p, step);
}

bool EarlyAppendPlaces::fill(ops::RopeAppendProblem& p, const Step& step) const {
  return !step.attention[attention].view.one_tile && append.fill(p, step);
}

bool AttentionPlaces::fill(ops::AttentionProblem& p, const Step& step) const {
  p.q.data = reinterpret_cast<const uint8_t*>(q.at(step));
  if (chunks) {
    p.q_before.data = reinterpret_cast<const uint8_t*>(chunks->before.at(step));
    p.q_far.data = reinterpret_cast<const uint8_t*>(chunks->far.at(step));
  }
  const ops::KvLayer& pages = step.kv_layers[layer];
  p.k = ops::keys_of(pages);
  p.v = ops::values_of(pages);
  p.coded = pages.coded;
  p.decoded = step.decoded;
  if (p.decoded.count > 0) {
    p.k.set_far(p.coded.first_page, p.decoded.k);
    p.v.set_far(p.coded.first_page, p.decoded.v);
  }
  p.batch = step.layout_of(layer);
  const AttentionBuffers& buffers = step.attention[shape];
  p.work = buffers.view;
  p.done = buffers.done;
  p.partial_out = buffers.partial_out;
  p.partial_ms = buffers.partial_ms;
  p.arranged = buffers.arranged;
  if (visits) p.visits = step.visits[*visits];
  if (out_operand) {
    p.out_operand = out_operand->at(step, step.layout.num_tokens);
  } else {
    p.out = reinterpret_cast<uint8_t*>(out.at(step));
  }
  if (weights) {
    p.weighted = step.weighted + static_cast<int64_t>(*weights) * step.layout.num_sequences;
    p.first_plane_head = static_cast<int32_t>(step.place_in_planes(layer)) * pages.num_kv_heads;
  }
  p.num_scored = 0;
  if (!p.mass.empty() && step.kept.is_kept()) {
    p.scored = step.batch->scored.data();
    p.num_scored = static_cast<int64_t>(step.batch->scored.size());
    p.kept = step.kept;
  }
  p.append.k = nullptr;
  if (append && p.work.one_tile) append->fill(p.append, step);
  return true;
}

template <class Problem>
void IndexPlaces::set(Problem& p, const Step& step) const {
  p.q = q.at(step);
  p.kv = step.kv_layers[layer];
  p.batch = step.layout_of(layer);
  p.visits = step.visits[visits];
}

bool IndexPlaces::fill(ops::PrefillIndexInputs& in, const Step& step) const {
  set(in, step);
  return in.visits.num_blocks > 0;
}

bool IndexPlaces::fill(ops::BucketIndexProblem& p, const Step& step) const {
  set(p, step);
  return p.visits.num_blocks > 0;
}

bool IndexPlaces::fill(ops::PageIndexProblem& p, const Step& step) const {
  set(p, step);
  if (!p.planes.name.empty()) {
    p.planes.scored = step.batch->scored.data();
    p.planes.num_scored = static_cast<int64_t>(step.batch->scored.size());
    p.planes.first_head = static_cast<int32_t>(step.place_in_planes(layer)) * p.kv.num_kv_heads;
    const std::span<const ops::MassRows> rows = rows_of(step, p.planes.name);
    p.planes.rows = rows.data();
    p.planes.num_rows = static_cast<int32_t>(rows.size());
  }
  return p.visits.num_rows > 0;
}

bool IndexPlaces::fill(ops::HashIndexProblem& p, const Step& step) const {
  set(p, step);
  return p.visits.num_rows > 0;
}

bool IndexPlaces::fill(ops::HistoryIndexProblem& p, const Step& step) const {
  return fill(p.pages, step);
}

bool IndexPlaces::fill(ops::StridedIndexProblem& p, const Step& step) const {
  p.batch = step.layout_of(layer);
  p.visits = step.visits[visits];
  return p.visits.has_lists();
}

bool AttentionMassPlaces::fill(ops::AttentionMassProblem& p, const Step& step) const {
  const std::span<const ScoredRows> scored = step.batch->scored;
  if (step.kept.is_kept() != of_kept) return false;
  p.kept = step.kept;
  const auto of_node = [&](const ScoredRows& rows) { return rows.name == p.name; };
  if (std::none_of(scored.begin(), scored.end(), of_node)) return false;
  p.q = q.at(step);
  p.kv = step.kv_layers[layer];
  p.batch = step.layout_of(layer);
  p.by_row = step.batch->phase == Phase::decode;
  p.scored = scored.data();
  p.num_scored = static_cast<int64_t>(scored.size());
  p.first_head = static_cast<int32_t>(step.place_in_planes(layer)) * p.kv.num_kv_heads;
  if (step.mass_rows == nullptr) return true;
  const std::span<const ops::MassRows> own = rows_of(step, p.name);
  p.rows = own.data();
  p.num_rows = static_cast<int32_t>(own.size());
  p.most_count = p.max_kv_len = 0;
  const std::span<const int32_t> kv_len = step.kv_len_of(layer);
  const auto first = static_cast<size_t>(own.data() - step.mass_rows);
  for (const ScoredRows& rows : scored.subspan(first, own.size())) {
    p.most_count = std::max(p.most_count, rows.rows);
    p.max_kv_len = std::max(p.max_kv_len, kv_len[static_cast<size_t>(rows.sequence)]);
  }
  p.sums = step.mass_sums;
  return true;
}

}  // namespace effinfer::executor
