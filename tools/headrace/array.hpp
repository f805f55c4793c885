// A tensor with memory of its own, row-major: what files are read into and calls write to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "headrace/headrace.hpp"

namespace headrace::tool {

using Shape = std::vector<std::int64_t>;

std::size_t element_size(DType dtype);
const char* dtype_name(DType dtype);         // "float32"
DType parse_dtype(const std::string& name);  // throws UsageError
std::string to_string(const Shape& shape);   // "[2, 128, 4, 64]"

struct Array {
  DType dtype = DType::float32;
  Shape shape;
  std::vector<std::byte> bytes;

  Array() = default;
  Array(DType type, Shape dimensions);  // zeros

  [[nodiscard]] std::int64_t size() const;
  [[nodiscard]] double at(std::int64_t index) const;  // floating-point dtypes only
  void set(std::int64_t index, double value);
  // A view that the library may read or, where it is an output, write.
  [[nodiscard]] Tensor tensor() const;
};

// Floating-point values in another floating-point dtype, rounded once to nearest even.
Array convert(const Array& array, DType dtype);

// Independent normal deviates, the same on every machine for the same seed.
class NormalSource {
 public:
  explicit NormalSource(std::uint64_t seed) : state_(seed) {}
  double next();

 private:
  double uniform();
  std::uint64_t state_;
  double spare_ = 0.0;
  bool has_spare_ = false;
};

Array normal_array(DType dtype, Shape shape, NormalSource& source);

// The tensors of a call by the names of Attention's members.
using Tensors = std::map<std::string, Array>;

// Calls visit with every tensor of a call and the name of its member.
void for_each_tensor(Attention& attention, const std::function<void(const char* name, Tensor& tensor)>& visit);

// Points the members of attention at the tensors; a member without a tensor becomes absent.
void bind_tensors(Attention& attention, const Tensors& tensors);

}  // namespace headrace::tool
