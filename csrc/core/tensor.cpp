#include "effinfer/tensor.h"

#include "effinfer/error.h"

namespace effinfer {

Dims::Dims(std::initializer_list<int64_t> dims) {
  for (const int64_t dim : dims) push_back(dim);
}

void Dims::push_back(int64_t dim) {
  if (rank_ == kMaxRank) {
    throw InvalidArgument("[tensor] expected at most " + std::to_string(kMaxRank) + " dimensions");
  }
  dims_[static_cast<size_t>(rank_++)] = dim;
}

int64_t Dims::num_elements() const {
  int64_t count = 1;
  for (int axis = 0; axis < rank_; ++axis) {
    const int64_t dim = (*this)[axis];
    if (dim < 0 || __builtin_mul_overflow(count, dim, &count)) {
      throw InvalidArgument("[tensor] shape " + to_string() + " has no int64 element count");
    }
  }
  return count;
}

bool Dims::operator==(const Dims& other) const {
  if (rank_ != other.rank_) return false;
  for (int axis = 0; axis < rank_; ++axis) {
    if ((*this)[axis] != other[axis]) return false;
  }
  return true;
}

std::string Dims::to_string() const {
  std::string text = "[";
  for (int axis = 0; axis < rank_; ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string((*this)[axis]);
  }
  return text + "]";
}

size_t TensorView::num_bytes() const {
  const DTypeInfo& info = dtype_info(dtype);
  const int64_t elements = dims.num_elements();
  const int64_t row = dims.rank() == 0 ? 1 : dims[dims.rank() - 1];
  if (row % info.block_size != 0) {
    throw InvalidArgument("[tensor] " + std::string(info.name) +
                          ": expected a last dimension that is a multiple of " +
                          std::to_string(info.block_size) + ", got shape " + dims.to_string());
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(elements / info.block_size, int64_t{info.block_bytes}, &bytes)) {
    throw InvalidArgument("[tensor] shape " + dims.to_string() + " is too large");
  }
  return static_cast<size_t>(bytes) + static_cast<size_t>(bytes == 0 ? 0 : info.tail_bytes);
}

StridedView StridedView::dense(void* data, DType dtype, const Dims& dims) {
  StridedView view{data, dtype, dims};
  int64_t stride = 1;
  for (int axis = dims.rank() - 1; axis >= 0; --axis) {
    view.strides[static_cast<size_t>(axis)] = stride;
    stride *= dims[axis];
  }
  return view;
}

bool StridedView::contiguous_rows() const {
  const int last = dims.rank() - 1;
  return last < 0 || dims[last] < 2 || stride(last) == 1 || dims.num_elements() == 0;
}

}  // namespace effinfer
