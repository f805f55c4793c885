#include "array.hpp"

#include <cmath>
#include <numbers>
#include <numeric>
#include <utility>

#include "command.hpp"
#include "describe/element.hpp"
#include "fmt/format.h"

namespace headrace::tool {
namespace {

constexpr std::pair<DType, const char*> dtype_names[] = {
    {DType::float32, "float32"}, {DType::float16, "float16"}, {DType::bfloat16, "bfloat16"},
    {DType::float64, "float64"}, {DType::boolean, "bool"},    {DType::int32, "int32"},
    {DType::int64, "int64"},
};

constexpr std::pair<const char*, Tensor Attention::*> members[] = {
    {"q", &Attention::q},
    {"k", &Attention::k},
    {"v", &Attention::v},
    {"out", &Attention::out},
    {"lse", &Attention::lse},
    {"bias", &Attention::bias},
    {"mask", &Attention::mask},
    {"alibi_slopes", &Attention::alibi_slopes},
    {"sinks", &Attention::sinks},
    {"block_mask", &Attention::block_mask},
    {"cu_seqlens_q", &Attention::cu_seqlens_q},
    {"cu_seqlens_k", &Attention::cu_seqlens_k},
    {"seqused_q", &Attention::seqused_q},
    {"seqused_k", &Attention::seqused_k},
    {"dout", &Attention::dout},
    {"dlse", &Attention::dlse},
    {"dq", &Attention::dq},
    {"dk", &Attention::dk},
    {"dv", &Attention::dv},
    {"dbias", &Attention::dbias},
    {"dsinks", &Attention::dsinks},
};

}  // namespace

std::size_t element_size(DType dtype) {
  switch (dtype) {
    case DType::boolean:
      return 1;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::float64:
    case DType::int64:
      return 8;
    default:
      return 4;
  }
}

const char* dtype_name(DType dtype) {
  for (const auto& [type, name] : dtype_names)
    if (type == dtype) return name;
  return "unknown";
}

DType parse_dtype(const std::string& text) {
  for (const auto& [type, name] : dtype_names)
    if (text == name) return type;
  throw UsageError(fmt::format("dtype {} is not known; give float32, float16, bfloat16 or float64", text));
}

std::string to_string(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

Array::Array(DType type, Shape dimensions) : dtype(type), shape(std::move(dimensions)) {
  bytes.resize(static_cast<std::size_t>(size()) * element_size(dtype));
}

std::int64_t Array::size() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

double Array::at(std::int64_t index) const { return load_element(bytes.data(), static_cast<hr_dtype>(dtype), index); }

void Array::set(std::int64_t index, double value) {
  store_element(bytes.data(), static_cast<hr_dtype>(dtype), index, value);
}

Tensor Array::tensor() const { return {bytes.data(), dtype, shape}; }

Array convert(const Array& array, DType dtype) {
  if (array.dtype == dtype) return array;
  Array result(dtype, array.shape);
  for (std::int64_t i = 0; i < array.size(); ++i) result.set(i, array.at(i));
  return result;
}

// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
double NormalSource::uniform() {
  std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return (static_cast<double>(z >> 11) + 0.5) * 0x1p-53;  // never 0, whose logarithm is infinite
}

// Box and Muller, "A note on the generation of random normal deviates", 1958.
double NormalSource::next() {
  if (std::exchange(has_spare_, false)) return spare_;
  const double radius = std::sqrt(-2.0 * std::log(uniform()));
  const double angle = 2.0 * std::numbers::pi * uniform();
  spare_ = radius * std::sin(angle);
  has_spare_ = true;
  return radius * std::cos(angle);
}

Array normal_array(DType dtype, Shape shape, NormalSource& source) {
  Array result(dtype, std::move(shape));
  for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, source.next());
  return result;
}

void for_each_tensor(Attention& attention, const std::function<void(const char* name, Tensor& tensor)>& visit) {
  for (const auto& [name, member] : members) visit(name, attention.*member);
}

void bind_tensors(Attention& attention, const Tensors& tensors) {
  for_each_tensor(attention, [&](const char* name, Tensor& tensor) {
    const auto found = tensors.find(name);
    tensor = found == tensors.end() ? Tensor() : found->second.tensor();
  });
}

}  // namespace headrace::tool
