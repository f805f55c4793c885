#include "support/array.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>

#include "describe/element.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define HEADRACE_TEST_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HEADRACE_TEST_ASAN 1
#endif
#endif

namespace headrace::test {
namespace {

// Under the address sanitizer the ends of the storage are the ends of the allocation, so that it sees
// reads beyond them too; elsewhere guard bytes see the writes.
#ifdef HEADRACE_TEST_ASAN
constexpr std::int64_t guard_bytes = 0;
#else
constexpr std::int64_t guard_bytes = 64;
#endif

}  // namespace

std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::boolean:
      return 1;
  }
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return "float64";
    case DType::float32:
      return "float32";
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    case DType::boolean:
      return "bool";
    case DType::int32:
      return "int32";
    case DType::int64:
      return "int64";
  }
  return "?";
}

const char* name_of(Layout layout) {
  switch (layout) {
    case Layout::contiguous:
      return "contiguous";
    case Layout::transposed:
      return "transposed";
    case Layout::permuted:
      return "permuted";
    case Layout::padded:
      return "padded";
    case Layout::aligned:
      return "aligned";
    case Layout::reversed:
      return "reversed";
    case Layout::expanded:
      return "expanded";
  }
  return "?";
}

void encode(DType dtype, double value, void* element) {
  const auto store = [element](auto x) { std::memcpy(element, &x, sizeof(x)); };
  switch (dtype) {
    case DType::boolean:
      return store(static_cast<std::uint8_t>(value != 0.0));
    case DType::int32:
      return store(static_cast<std::int32_t>(value));
    case DType::int64:
      return store(static_cast<std::int64_t>(value));
    default:
      return store_element(element, static_cast<hr_dtype>(dtype), 0, value);
  }
}

double decode(DType dtype, const void* element) {
  const auto load = [element]<typename T>(T x) {
    std::memcpy(&x, element, sizeof(x));
    return x;
  };
  switch (dtype) {
    case DType::boolean:
      return load(std::uint8_t{});
    case DType::int32:
      return load(std::int32_t{});
    case DType::int64:
      return static_cast<double>(load(std::int64_t{}));
    default:
      return load_element(element, static_cast<hr_dtype>(dtype), 0);
  }
}

double rounded(DType dtype, double value) {
  double storage = 0.0;
  encode(dtype, value, &storage);
  return decode(dtype, &storage);
}

Array::Array(DType dtype, const Shape& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t next = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = next;
    next *= shape[i];
  }
  place(dtype, shape, strides, 0, next, 0);
  mark_elements();
}

Array::Array(DType dtype, const Shape& shape, Layout layout, Elements elements, Rng& rng) {
  const std::size_t n = shape.size();
  const std::size_t movable = elements == Elements::vectors ? n - 1 : n;  // dimensions with free strides
  std::vector<std::size_t> order(n);                                      // outermost first
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (layout == Layout::transposed && movable >= 2) std::swap(order[movable - 1], order[movable - 2]);
  if (layout == Layout::permuted || layout == Layout::reversed) {
    for (std::size_t i = movable; i-- > 1;)
      std::swap(order[i], order[static_cast<std::size_t>(rng.integer(0, static_cast<std::int64_t>(i)))]);
  }

  std::vector<std::int64_t> strides(n);
  std::int64_t next = layout == Layout::padded && elements == Elements::scalars ? rng.integer(1, 3) : 1;
  for (std::size_t place_of = n; place_of-- > 0;) {
    const std::size_t dim = order[place_of];
    const bool expand = layout == Layout::expanded && dim < movable && rng.chance(0.5);
    strides[dim] = expand ? 0 : next;
    if (expand) continue;
    next *= std::max<std::int64_t>(shape[dim], 1);
    if (layout == Layout::padded) next += rng.integer(0, 9);
    if (layout == Layout::aligned) next = (next + 7) / 8 * 8 + 8 * rng.integer(0, 2);
  }
  std::int64_t first = 0;
  for (std::size_t dim = 0; dim < movable; ++dim) {
    if (layout == Layout::reversed && shape[dim] > 0 && rng.chance(0.6)) {
      first += (shape[dim] - 1) * strides[dim];
      strides[dim] = -strides[dim];
    }
    // The stride of a dimension of one element means nothing, so it may be anything.
    if (shape[dim] == 1 && layout != Layout::contiguous) strides[dim] = rng.integer(0, 12345);
  }
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  place(dtype, shape, strides, empty ? 0 : first, empty ? 0 : next, rng.integer(0, 15));
  mark_elements();
}

std::vector<Array> Array::interleaved(DType dtype, const Shape& outer, const std::vector<std::int64_t>& heads,
                                      std::int64_t dim, Rng& rng) {
  const std::int64_t all_heads = std::accumulate(heads.begin(), heads.end(), std::int64_t{0});
  Shape shape = outer;
  shape.push_back(all_heads);
  shape.push_back(dim);
  const Array whole(dtype, shape, Layout::contiguous, Elements::vectors, rng);
  std::vector<Array> parts;
  std::int64_t first = 0;
  for (const std::int64_t count : heads) {
    Array part = whole;
    part.view_.shape[part.view_.ndim - 2] = count;
    if (part.size() > 0) part.view_.data = static_cast<std::byte*>(part.view_.data) + first * dim * size_of(dtype);
    part.mark_elements();
    parts.push_back(part);
    first += count;
  }
  return parts;
}

Array Array::expanded(const Shape& shape) const {
  Array result = *this;
  for (int i = 0; i < view_.ndim; ++i) {
    const std::int64_t size = shape[static_cast<std::size_t>(i)];
    if (size != view_.shape[i]) result.view_.stride[i] = 0;
    result.view_.shape[i] = size;
  }
  return result;
}

std::int64_t Array::size() const {
  if (!present()) return 0;
  return std::accumulate(view_.shape, view_.shape + view_.ndim, std::int64_t{1}, std::multiplies<>());
}

void Array::place(DType dtype, const Shape& shape, const std::vector<std::int64_t>& strides, std::int64_t first,
                  std::int64_t elements, std::int64_t misalign) {
  const std::int64_t bytes = size_of(dtype);
  const std::int64_t before = guard_bytes + misalign * bytes;
  storage_ = std::make_shared<Storage>();
  storage_->size = static_cast<std::size_t>(before + elements * bytes + guard_bytes);
  storage_->memory = std::make_unique<std::byte[]>(storage_->size);
  storage_->element.assign(storage_->size, false);
  view_ = Tensor(storage_->memory.get() + before + first * bytes, dtype, shape);
  std::copy(strides.begin(), strides.end(), view_.stride);
  poison(0xFF);
}

template <typename F>
void Array::for_each(F&& visit) const {
  std::array<std::int64_t, 4> shape{1, 1, 1, 1}, stride{};
  const int skip = 4 - view_.ndim;
  for (int i = 0; i < view_.ndim; ++i) {
    shape[static_cast<std::size_t>(skip + i)] = view_.shape[i];
    stride[static_cast<std::size_t>(skip + i)] = view_.stride[i];
  }
  auto* const data = static_cast<std::byte*>(view_.data);
  const std::int64_t bytes = size_of(dtype());
  for (std::int64_t a = 0; a < shape[0]; ++a)
    for (std::int64_t b = 0; b < shape[1]; ++b)
      for (std::int64_t c = 0; c < shape[2]; ++c)
        for (std::int64_t d = 0; d < shape[3]; ++d)
          visit(data + (a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]) * bytes);
}

void Array::mark_elements() {
  const auto bytes = static_cast<std::size_t>(size_of(dtype()));
  for_each([&](const std::byte* element) {
    const auto at = static_cast<std::size_t>(element - storage_->memory.get());
    for (std::size_t i = 0; i < bytes; ++i) storage_->element[at + i] = true;
  });
}

void Array::fill(const std::vector<double>& values) {
  std::size_t next = 0;
  const DType type = dtype();
  for_each([&](std::byte* element) { encode(type, values[next++], element); });
}

std::vector<double> Array::values() const {
  std::vector<double> result;
  result.reserve(static_cast<std::size_t>(size()));
  if (!present()) return result;
  const DType type = dtype();
  for_each([&](const std::byte* element) { result.push_back(decode(type, element)); });
  return result;
}

std::vector<std::byte> Array::bytes() const {
  std::vector<std::byte> result;
  if (!present()) return result;
  const std::int64_t bytes = size_of(dtype());
  result.reserve(static_cast<std::size_t>(size() * bytes));
  for_each([&](const std::byte* element) { result.insert(result.end(), element, element + bytes); });
  return result;
}

void Array::poison(std::uint8_t byte) { std::fill_n(storage_->memory.get(), storage_->size, std::byte{byte}); }

void Array::remember() {
  if (present()) storage_->remembered.assign(storage_->memory.get(), storage_->memory.get() + storage_->size);
}

bool Array::unchanged() const {
  return !present() || std::equal(storage_->remembered.begin(), storage_->remembered.end(), storage_->memory.get());
}

bool Array::gaps_unchanged() const {
  if (!present()) return true;
  for (std::size_t i = 0; i < storage_->size; ++i) {
    if (!storage_->element[i] && storage_->memory[i] != storage_->remembered[i]) return false;
  }
  return true;
}

std::string Array::describe() const {
  if (!present()) return "absent";
  std::ostringstream text;
  const auto list = [&](const std::int64_t* values) {
    text << '[';
    for (int i = 0; i < view_.ndim; ++i) text << (i == 0 ? "" : ", ") << values[i];
    text << ']';
  };
  text << name_of(dtype()) << ' ';
  list(view_.shape);
  text << " strides ";
  list(view_.stride);
  return text.str();
}

}  // namespace headrace::test
