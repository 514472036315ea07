#include "cuda/bodies/page_bounds.h"
#include "cuda/bodies/page_index.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::PageIndexProblem;

const char* rejects(const PageIndexProblem& p) {
  if (p.unit != ops::kPageSize) return "keys are not chosen in whole pages of 64";
  if (p.means) return "pages are chosen by means";
  if (p.window_left >= 0) return "keys are chosen of a window";
  if (p.vote != ops::HeadVote::highest) return "vote is not \"highest\"";
  const DType dtype = p.kv.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::i8) {
    return "kv_dtype is not f32, f16, bf16 or i8";
  }
  if (p.kv.head_dim <= 0 || p.kv.head_dim % 16 != 0) return "head_dim is not a multiple of 16";
  const int64_t group = p.group();
  if (group * p.kv.head_dim > PageIndexKernel::kMostQueries) {
    return "heads that share keys x head_dim are above 8192";
  }
  const int64_t pages = (p.max_kv_len + ops::kPageSize - 1) / ops::kPageSize;
  if (group * pages > PageIndexKernel::kMostScores || pages > RowList::kMost) {
    return "heads that share keys x pages are above 12288, or pages above 4096";
  }
  return nullptr;
}

size_t shared_bytes(const PageIndexProblem&) {
  return sizeof(PageIndexKernel::Shared);
}

void page_index(const PageIndexProblem& p, Queue& queue) {
  const int64_t lists = p.visits.num_rows * p.kv.num_kv_heads;
  PageIndexParams params = {p, static_cast<int64_t>(p.kv.head_bytes()), 0};
  const auto bound = [&]<DType kType>() {
    using Kernel = PageBoundsKernel<kType>;
    params.parts = static_cast<int32_t>(blocks_for(p.visits.list_words, Kernel::kBlockPages));
    launch<Kernel>(params, lists * params.parts, queue);
  };
  switch (p.kv.dtype) {
    case DType::f32:
      bound.template operator()<DType::f32>();
      break;
    case DType::f16:
      bound.template operator()<DType::f16>();
      break;
    case DType::bf16:
      bound.template operator()<DType::bf16>();
      break;
    default:
      bound.template operator()<DType::i8>();
  }
  launch<PageIndexKernel>(params, lists, queue);
}

}  // namespace

void register_page_index() {
  add<PageIndexProblem>("page_index", rejects, page_index, shared_bytes);
}

}  // namespace effinfer::cuda
