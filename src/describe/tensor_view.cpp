#include "describe/tensor_view.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>

namespace headrace {
namespace {

constexpr std::uint64_t int64_max = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

std::uint64_t magnitude(std::int64_t value) {
  return value < 0 ? 0 - static_cast<std::uint64_t>(value) : static_cast<std::uint64_t>(value);
}

// Joins with commas and a last "or".
std::string alternatives(std::initializer_list<hr_dtype> dtypes) {
  std::string text;
  for (const hr_dtype* it = dtypes.begin(); it != dtypes.end(); ++it) {
    if (it != dtypes.begin()) text += it + 1 == dtypes.end() ? " or " : ", ";
    text += dtype_name(*it);
  }
  return text;
}

// Dimensions that move, by |stride|.
struct Steps {
  std::array<int, 4> order{};
  int count = 0;

  explicit Steps(const hr_tensor& tensor) {
    for (int i = 0; i < tensor.ndim; ++i) {
      if (stride_of(tensor, i) == 0) continue;
      int at = count++;
      for (; at > 0 && magnitude(tensor.stride[before(at)]) > magnitude(tensor.stride[i]); --at)
        order[static_cast<std::size_t>(at)] = before(at);
      order[static_cast<std::size_t>(at)] = i;
    }
  }

  // The first dimension (in order) that does not step over what the ones before it span; -1 if none.
  [[nodiscard]] int first_overlap(const hr_tensor& tensor) const {
    std::uint64_t reach = 0;
    for (int n = 0; n < count; ++n) {
      const int i = order[static_cast<std::size_t>(n)];
      const std::uint64_t step = magnitude(tensor.stride[i]);
      if (step <= reach) return i;
      reach += static_cast<std::uint64_t>(tensor.shape[i] - 1) * step;
    }
    return -1;
  }

 private:
  [[nodiscard]] int before(int at) const { return order[static_cast<std::size_t>(at - 1)]; }
};

}  // namespace

std::string dtype_name(std::int32_t dtype) {
  switch (dtype) {
    case HR_FLOAT32:
      return "float32";
    case HR_FLOAT16:
      return "float16";
    case HR_BFLOAT16:
      return "bfloat16";
    case HR_FLOAT64:
      return "float64";
    case HR_BOOL:
      return "bool";
    case HR_INT32:
      return "int32";
    case HR_INT64:
      return "int64";
    default:
      return fmt::format("dtype {}", dtype);
  }
}

std::string shape_text(const hr_tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.shape, tensor.shape + std::clamp(tensor.ndim, 0, 4), ", "));
}

bool is_empty(const hr_tensor& tensor) {
  return std::any_of(tensor.shape, tensor.shape + tensor.ndim, [](std::int64_t size) { return size == 0; });
}

std::int64_t stride_of(const hr_tensor& tensor, int dimension) {
  return tensor.shape[dimension] <= 1 || is_empty(tensor) ? 0 : tensor.stride[dimension];
}

void check_present(std::string_view name, const hr_tensor& tensor) {
  if (!is_present(tensor)) throw Failure(HR_ERROR_VALUE, fmt::format("{}: is absent (ndim 0); it is required", name));
}

void check_dtype(std::string_view name, const hr_tensor& tensor, std::initializer_list<hr_dtype> allowed) {
  if (std::find(allowed.begin(), allowed.end(), tensor.dtype) != allowed.end()) return;
  throw Failure(HR_ERROR_TYPE,
                fmt::format("{}: dtype is {}; it must be {}", name, dtype_name(tensor.dtype), alternatives(allowed)));
}

void check_view(std::string_view name, const hr_tensor& tensor, int ndim, std::string_view layout) {
  if (tensor.ndim != ndim)
    throw Failure(HR_ERROR_VALUE, fmt::format("{}: ndim is {}; it must be {}: {}", name, tensor.ndim, ndim, layout));
  std::uint64_t elements = static_cast<std::uint64_t>(dtype_size(tensor.dtype));
  bool overflow = false;
  for (int i = 0; i < ndim; ++i) {
    if (tensor.shape[i] < 0 || tensor.shape[i] >= size_limit)
      throw Failure(HR_ERROR_VALUE, fmt::format("{}: shape is {}; every size must be at least 0 and below 2^40", name,
                                                shape_text(tensor)));
    const auto size = static_cast<std::uint64_t>(std::max<std::int64_t>(tensor.shape[i], 1));
    overflow = __builtin_mul_overflow(elements, size, &elements) || elements > int64_max || overflow;
  }
  if (overflow)
    throw Failure(HR_ERROR_VALUE, fmt::format("{}: shape is {} of {}; its size in bytes must fit 64 bits", name,
                                              shape_text(tensor), dtype_name(tensor.dtype)));
  std::uint64_t reach = 1;
  for (int i = 0; i < ndim; ++i) {
    if (stride_of(tensor, i) == 0) continue;
    std::uint64_t step = 0;
    overflow =
        __builtin_mul_overflow(static_cast<std::uint64_t>(tensor.shape[i] - 1), magnitude(tensor.stride[i]), &step) ||
        __builtin_add_overflow(reach, step, &reach) || overflow;
  }
  overflow = __builtin_mul_overflow(reach, static_cast<std::uint64_t>(dtype_size(tensor.dtype)), &reach) || overflow;
  if (overflow || reach > int64_max)
    throw Failure(HR_ERROR_VALUE,
                  fmt::format("{}: strides are [{}] for shape {}; every offset in bytes must fit 64 bits", name,
                              fmt::join(tensor.stride, tensor.stride + ndim, ", "), shape_text(tensor)));
}

void check_vectors(std::string_view name, const hr_tensor& tensor) {
  const int last = tensor.ndim - 1;
  if (tensor.shape[last] <= 1 || is_empty(tensor) || tensor.stride[last] == 1) return;
  throw Failure(HR_ERROR_VALUE, fmt::format("{}: the stride of the last dimension is {}; it must be 1 (contiguous)",
                                            name, tensor.stride[last]));
}

void check_output(std::string_view name, const hr_tensor& tensor) {
  if (is_empty(tensor)) return;
  const auto strides = [&] { return fmt::format("[{}]", fmt::join(tensor.stride, tensor.stride + tensor.ndim, ", ")); };
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] > 1 && tensor.stride[i] <= 0)
      throw Failure(HR_ERROR_VALUE,
                    fmt::format("{}: strides are {}; those of an output must be positive", name, strides()));
  }
  if (Steps(tensor).first_overlap(tensor) >= 0)
    throw Failure(HR_ERROR_VALUE, fmt::format("{}: strides are {} for shape {}; elements of an output must not overlap",
                                              name, strides(), shape_text(tensor)));
}

void check_data(std::string_view name, const hr_tensor& tensor) {
  if (is_empty(tensor)) return;
  if (tensor.data == nullptr)
    throw Failure(HR_ERROR_VALUE,
                  fmt::format("{}: data is NULL; a tensor of shape {} needs memory", name, shape_text(tensor)));
  const auto size = static_cast<std::uintptr_t>(dtype_size(tensor.dtype));
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % size != 0)
    throw Failure(HR_ERROR_VALUE, fmt::format("{}: data is at {}; {} must be aligned to {} bytes", name,
                                              fmt::ptr(tensor.data), dtype_name(tensor.dtype), size));
}

Span::Span(const hr_tensor& tensor) : tensor_(&tensor) {
  if (is_empty(tensor)) return;
  const std::int64_t size = dtype_size(tensor.dtype);
  std::int64_t below = 0, above = size;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 1) continue;
    const std::int64_t reach = (tensor.shape[i] - 1) * tensor.stride[i] * size;
    (reach < 0 ? below : above) += reach;
  }
  const auto data = reinterpret_cast<std::uintptr_t>(tensor.data);
  begin_ = data + static_cast<std::uintptr_t>(below);
  end_ = data + static_cast<std::uintptr_t>(above);
}

bool Span::gapless() const {
  std::int64_t distinct = dtype_size(tensor_->dtype);
  for (int i = 0; i < tensor_->ndim; ++i)
    if (stride_of(*tensor_, i) != 0) distinct *= tensor_->shape[i];
  return static_cast<std::uintptr_t>(distinct) == end_ - begin_ && Steps(*tensor_).first_overlap(*tensor_) < 0;
}

bool Span::covers(const Span& ends_of) const {
  const auto inside = [&](std::uintptr_t address) { return begin_ <= address && address < end_; };
  return (inside(ends_of.begin_) || inside(ends_of.end_ - 1) ||
          inside(reinterpret_cast<std::uintptr_t>(ends_of.tensor_->data))) &&
         gapless();
}

bool Span::shares_element_with(const Span& other) const {
  return tensor_->data == other.tensor_->data || covers(other) || other.covers(*this);
}

}  // namespace headrace
