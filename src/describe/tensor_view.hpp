// What can be said of one hr_tensor by itself: names, sizes, strides and the memory it spans.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "describe/problem.hpp"

namespace headrace {

// Sizes of dimensions stay below this, so that sums of a few of them, and of the bounds of a Band, fit 64 bits.
inline constexpr std::int64_t size_limit = std::int64_t{1} << 40;

std::string dtype_name(std::int32_t dtype);       // "float32", ...; "dtype 17" for a number that names none
std::string shape_text(const hr_tensor& tensor);  // "[2, 3, 4]"

// In bytes.
constexpr std::int64_t dtype_size(std::int32_t dtype) {
  switch (dtype) {
    case HR_BOOL:
      return 1;
    case HR_FLOAT16:
    case HR_BFLOAT16:
      return 2;
    case HR_FLOAT32:
    case HR_INT32:
      return 4;
    default:
      return 8;
  }
}

inline bool is_present(const hr_tensor& tensor) { return tensor.ndim != 0; }
bool is_empty(const hr_tensor& tensor);  // has no elements; ndim must be valid

// The stride of a dimension, and 0 where it moves nothing: a dimension of size 1 or a tensor without elements.
std::int64_t stride_of(const hr_tensor& tensor, int dimension);

// Throws if the tensor is absent.
void check_present(std::string_view name, const hr_tensor& tensor);

// Throws unless the tensor has one of the dtypes.
void check_dtype(std::string_view name, const hr_tensor& tensor, std::initializer_list<hr_dtype> allowed);

// Throws unless ndim is as given, every size is in [0, 2^40), and every byte offset inside the tensor, as well as
// the number of its elements, fits 64 bits. layout is shown in the message, "[batch, seqlen_q, heads_q, head_dim]".
// The dtype must have been checked before.
void check_view(std::string_view name, const hr_tensor& tensor, int ndim, std::string_view layout);

// Throws unless the elements of the last dimension lie side by side.
void check_vectors(std::string_view name, const hr_tensor& tensor);

// Throws unless the strides are positive and keep the elements apart. Sufficient, not necessary: sorted by stride,
// every dimension must step over all that the smaller ones span.
void check_output(std::string_view name, const hr_tensor& tensor);

// Throws unless data can be used: not null (unless the tensor is empty) and aligned to an element.
void check_data(std::string_view name, const hr_tensor& tensor);

// The bytes from a tensor's lowest to behind its highest element; none of a tensor without elements. Refers to the
// tensor.
class Span {
 public:
  Span() = default;
  explicit Span(const hr_tensor& tensor);
  // True where two tensors are sure to share an element: same first element, or one of them fills its span without a
  // gap and the other has its first, lowest or highest element there. Interleaved tensors (q, k and v of one packed
  // projection) are apart although their spans cross.
  [[nodiscard]] bool shares_memory_with(const Span& other) const {
    return begin_ < other.end_ && other.begin_ < end_ && shares_element_with(other);
  }

 private:
  [[nodiscard]] bool shares_element_with(const Span& other) const;  // of spans that cross
  [[nodiscard]] bool gapless() const;                               // every byte is known to belong to an element
  [[nodiscard]] bool covers(const Span& ends_of) const;

  const hr_tensor* tensor_ = nullptr;
  std::uintptr_t begin_ = 0, end_ = 0;
};

inline bool share_memory(const hr_tensor& a, const hr_tensor& b) { return Span(a).shares_memory_with(Span(b)); }

}  // namespace headrace
