// AttentionPlan: what it is given, checked and copied.
#include "ops/attention_plan.h"

#include <algorithm>
#include <string>
#include <type_traits>

#include "ops/validate.h"

namespace effinfer::ops {
namespace {

const Validator kCheck("attention plan");

// Of a call: what plans hold of a row fits in memory, whatever the numbers of a caller.
constexpr int64_t kMostRows = 1 << 22;

std::vector<int32_t> ints(std::string_view argument, const TensorView& view) {
  const std::span<const int32_t> values = kCheck.ints(argument, view);
  return {values.begin(), values.end()};
}

// Of that many segments.
template <class Int>
void check_indptr(std::string_view argument, const std::vector<Int>& values, int64_t segments) {
  const auto count = static_cast<int64_t>(values.size());
  kCheck.expect(count == segments + 1, argument, std::to_string(segments + 1) + " values",
                std::to_string(count));
  kCheck.indptr(argument, values.data(), count);
}

std::string interval(const char* what, int64_t begin, int64_t end) {
  std::string text = what;
  text.append("[").append(std::to_string(begin)).append(", ");
  return text.append(std::to_string(end)).append(")");
}

void check_geometry(const AttentionGeometry& g) {
  const auto positive = [](std::string_view argument, int32_t value, int32_t most) {
    kCheck.expect(value > 0 && value <= most, argument, "1 to " + std::to_string(most),
                  std::to_string(value));
  };
  constexpr int32_t kMost = 1 << 24;
  positive("num_qo_heads", g.num_qo_heads, kMost);
  positive("num_kv_heads", g.num_kv_heads, kMost);
  positive("head_dim_qk", g.head_dim_qk, kMaxHeadDim);
  positive("head_dim_vo", g.head_dim_vo, kMaxHeadDim);
  positive("page_size", g.page_size, kMost);
  kCheck.expect(g.num_qo_heads % g.num_kv_heads == 0, "num_qo_heads",
                "a multiple of num_kv_heads, " + std::to_string(g.num_kv_heads),
                std::to_string(g.num_qo_heads));
  kCheck.at_least("window_left", g.window_left, -1);
  kCheck.at_least("sink_tokens", g.sink_tokens, 0);
}

}  // namespace

ListCopies::ListCopies(const AttentionLists& given) : views(given) {
  const auto copy = [](TensorView& view, auto& to) {
    using Number = typename std::remove_reference_t<decltype(to)>::value_type;
    const auto* from = static_cast<const Number*>(view.data);
    if (view.dims.rank() > 0) to.assign(from, from + view.dims.num_elements());
    view.data = to.data();
  };
  copy(views.lists, lists);
  copy(views.indptr, indptr);
  copy(views.spans, spans);
  copy(views.span_masks, span_masks);
}

AttentionPlan::Impl::Impl(const AttentionGeometry& g, const AttentionSequences& given,
                          const AttentionLists* lists)
    : geometry(g) {
  check_geometry(g);
  kv_len = ints("kv_len", given.kv_len);
  const auto sequences = static_cast<int64_t>(kv_len.size());
  qo_indptr = ints("qo_indptr", given.qo_indptr);
  check_indptr("qo_indptr", qo_indptr, sequences);
  kCheck.expect(num_rows() <= kMostRows, "qo_indptr",
                "at most " + std::to_string(kMostRows) + " query rows", std::to_string(num_rows()));
  kv_indptr = ints("kv_indptr", given.kv_indptr);
  check_indptr("kv_indptr", kv_indptr, sequences);
  paged = given.kv_indices.dims.rank() > 0;
  if (paged) {
    kv_indices = ints("kv_indices", given.kv_indices);
    kCheck.expect(kv_indptr.back() <= static_cast<int32_t>(kv_indices.size()), "kv_indptr",
                  "at most " + std::to_string(kv_indices.size()) + ", the size of kv_indices",
                  std::to_string(kv_indptr.back()));
    for (int32_t i = 0; i < kv_indptr.back(); ++i) {
      const int32_t page = kv_indices[static_cast<size_t>(i)];
      kCheck.at_least(indexed("kv_indices", i), page, 0);
      num_kv_rows = std::max(num_kv_rows, int64_t{page} + 1);
    }
  }
  for (int64_t s = 0; s < sequences; ++s) {
    const int32_t length = kv_len[static_cast<size_t>(s)];
    const int64_t entries =
        kv_indptr[static_cast<size_t>(s + 1)] - kv_indptr[static_cast<size_t>(s)];
    const int64_t room = paged ? entries * g.page_size : entries;
    kCheck.expect(
        length >= 0 && length <= room, indexed("kv_len", s),
        "0 to " + std::to_string(room) + ", the tokens of its " + (paged ? "pages" : "rows"),
        std::to_string(length));
  }
  if (!paged) num_kv_rows = kv_indptr.back();
  if (given.mask.dims.rank() > 0) copy_mask(given.mask);
  if (has_mask && lists == nullptr) set_mask_starts(given.mask_indptr);
  if (lists == nullptr) return;
  check_lists(*lists);
  blocks = std::make_unique<ListCopies>(*lists);
}

void AttentionPlan::Impl::copy_mask(const TensorView& view) {
  kCheck.dtype("mask", view, DType::u8);
  kCheck.rank("mask", view, 1);
  const auto* bytes = static_cast<const uint8_t*>(view.data);
  mask.assign(bytes, bytes + view.dims[0]);
  mask_row_strides.assign(kv_len.begin(), kv_len.end());
  has_mask = true;
}

void AttentionPlan::Impl::set_mask_starts(const TensorView& view) {
  kCheck.dtype("mask_indptr", view, DType::i64);
  kCheck.rank("mask_indptr", view, 1);
  const auto* values = static_cast<const int64_t*>(view.data);
  std::vector<int64_t>& starts = mask_starts;
  starts.assign(values, values + view.dims[0]);
  check_indptr("mask_indptr", starts, num_sequences());
  kCheck.expect(starts.back() <= static_cast<int64_t>(mask.size()), "mask_indptr",
                "at most " + std::to_string(mask.size()) + ", the bytes of the mask",
                std::to_string(starts.back()));
  for (size_t s = 0; s < kv_len.size(); ++s) {
    const int64_t bits = int64_t{qo_indptr[s + 1] - qo_indptr[s]} * kv_len[s];
    const int64_t bytes = starts[s + 1] - starts[s];
    kCheck.expect(bytes >= (bits + 7) / 8, indexed("mask_indptr", static_cast<int64_t>(s)),
                  std::to_string((bits + 7) / 8) + " bytes for " + std::to_string(bits) + " bits",
                  std::to_string(bytes));
  }
  for (int64_t& start : starts) start *= 8;
}

void AttentionPlan::Impl::check_lists(const AttentionLists& given) {
  kCheck.dtype("lists", given.lists, DType::i32);
  kCheck.rank("lists", given.lists, 2);
  const int64_t count = given.lists.dims[0];
  kCheck.shape("lists", given.lists, {count, 4});
  const std::vector<int32_t> indptr = ints("list_indptr", given.indptr);
  check_indptr("list_indptr", indptr, count);
  kCheck.dtype("spans", given.spans, DType::i32);
  kCheck.rank("spans", given.spans, 2);
  kCheck.shape("spans", given.spans, {given.spans.dims[0], 2});
  kCheck.expect(indptr.back() <= given.spans.dims[0], "list_indptr",
                "at most " + std::to_string(given.spans.dims[0]) + ", the number of spans",
                std::to_string(indptr.back()));
  kCheck.expect(has_mask == (given.span_masks.dims.rank() > 0), "span_masks",
                has_mask ? "an array, with a mask" : "None without a mask",
                has_mask ? "None" : "an array");
  if (has_mask) {
    kCheck.dtype("span_masks", given.span_masks, DType::i64);
    kCheck.shape("span_masks", given.span_masks, {given.spans.dims[0]});
    kCheck.at_least("mask_row_stride", given.mask_row_stride, 0);
    std::fill(mask_row_strides.begin(), mask_row_strides.end(), given.mask_row_stride);
  }
  const auto* lists = static_cast<const int32_t*>(given.lists.data);
  std::vector<uint8_t> covered(static_cast<size_t>(num_rows() * geometry.num_kv_heads));
  for (int64_t l = 0; l < count; ++l) {
    check_list(l, lists + 4 * l, covered);
    check_spans(given, lists + 4 * l, indptr[static_cast<size_t>(l)],
                indptr[static_cast<size_t>(l + 1)]);
  }
  const auto hole = std::find(covered.begin(), covered.end(), 0) - covered.begin();
  kCheck.expect(hole == static_cast<int64_t>(covered.size()), "lists",
                "every row and KV head in a list",
                "none for row " + std::to_string(hole / geometry.num_kv_heads) + ", KV head " +
                    std::to_string(hole % geometry.num_kv_heads));
}

void AttentionPlan::Impl::check_list(int64_t index, const int32_t* list,
                                     std::vector<uint8_t>& covered) const {
  const std::string argument = indexed("lists", index);
  const int32_t sequence = list[0];
  kCheck.expect(sequence >= 0 && sequence < num_sequences(), argument + ".sequence",
                interval("a value in ", 0, num_sequences()), std::to_string(sequence));
  kCheck.expect(list[1] >= 0 && list[1] < geometry.num_kv_heads, argument + ".kv_head",
                interval("a value in ", 0, geometry.num_kv_heads), std::to_string(list[1]));
  const int32_t begin = qo_indptr[static_cast<size_t>(sequence)];
  const int32_t end = qo_indptr[static_cast<size_t>(sequence + 1)];
  kCheck.expect(list[2] >= begin && list[3] >= 0 && list[3] <= end - list[2], argument + ".rows",
                interval("rows of ", begin, end),
                std::to_string(list[3]) + " from " + std::to_string(list[2]));
  for (int64_t row = list[2]; row < list[2] + list[3]; ++row) {
    uint8_t& once = covered[static_cast<size_t>(row * geometry.num_kv_heads + list[1])];
    kCheck.expect(once == 0, argument, "rows that are in no other list of the KV head",
                  "row " + std::to_string(row) + " again");
    once = 1;
  }
}

void AttentionPlan::Impl::check_spans(const AttentionLists& given, const int32_t* list,
                                      int32_t first, int32_t last) const {
  const auto* spans = static_cast<const int32_t*>(given.spans.data);
  const int32_t length = kv_len[static_cast<size_t>(list[0])];
  int32_t end = 0;
  for (int32_t i = first; i < last; ++i) {
    const int32_t* span = spans + 2 * int64_t{i};
    if (span[0] < end || span[1] <= span[0] || span[1] > length) {
      kCheck.expect(false, indexed("spans", i),
                    interval("tokens behind the span before, of ", end, length),
                    interval("", span[0], span[1]));
    }
    end = span[1];
    if (!has_mask || list[3] == 0) continue;
    const int64_t bit = static_cast<const int64_t*>(given.span_masks.data)[i];
    const int64_t bits = static_cast<int64_t>(mask.size()) * 8;
    const int64_t most = bits - (span[1] - span[0]);
    const bool fits = bit >= 0 && bit <= most &&
                      (list[3] == 1 || given.mask_row_stride <= (most - bit) / (list[3] - 1));
    kCheck.expect(fits, indexed("span_masks", i),
                  "a bit whose rows end within the " + std::to_string(bits) + " of the mask",
                  std::to_string(bit));
  }
}

AttentionPlan::AttentionPlan(const AttentionGeometry& geometry, const AttentionSequences& sequences)
    : impl_(std::make_unique<Impl>(geometry, sequences)) {
  plan_attention(impl_->shape(), impl_->batch(), impl_->work);
}

AttentionPlan::AttentionPlan(const AttentionGeometry& geometry, const AttentionSequences& sequences,
                             const AttentionLists& lists)
    : impl_(std::make_unique<Impl>(geometry, sequences, &lists)) {
  plan_attention(impl_->shape(), impl_->batch(), lists, impl_->work);
}

AttentionPlan::~AttentionPlan() = default;
AttentionPlan::AttentionPlan(AttentionPlan&&) noexcept = default;
AttentionPlan& AttentionPlan::operator=(AttentionPlan&&) noexcept = default;

FixedPlans::FixedPlans(int64_t most_listed, int64_t most_mask_bytes)
    : impl_(std::make_shared<Impl>()) {
  kCheck.at_least("most_listed", most_listed, 0);
  kCheck.at_least("most_mask_bytes", most_mask_bytes, 0);
  impl_->most_listed = static_cast<size_t>(most_listed);
  impl_->most_mask_bytes = static_cast<size_t>(most_mask_bytes);
}
FixedPlans::~FixedPlans() = default;
FixedPlans::FixedPlans(FixedPlans&&) noexcept = default;
FixedPlans& FixedPlans::operator=(FixedPlans&&) noexcept = default;

void AttentionPlan::put(FixedPlans& memory, Queue& queue) {
  kCheck.expect(impl_->blocks == nullptr, "lists", "none", "lists of blocks");
  PlanLists lists = impl_->lists();
  if (impl_->paged) lists.num_listed = impl_->kv_indptr.back();
  memory.impl_->put(impl_->device_plans.get(), impl_->geometry, impl_->shape(), lists, queue);
  impl_->device_plans->fix(memory.impl_);
}

const AttentionGeometry& AttentionPlan::geometry() const {
  return impl_->geometry;
}

int64_t AttentionPlan::num_rows() const {
  return impl_->num_rows();
}

int64_t AttentionPlan::num_products() const {
  int64_t products = 0;
  for (const AttentionTile& tile : impl_->work.tiles) {
    const int64_t hidden = int64_t{tile.first_unit - tile.sink_units} * kUnitTokens;
    products += int64_t{tile.num_rows} * tile.num_heads * (tile.num_tokens - hidden);
  }
  return products;
}

}  // namespace effinfer::ops
