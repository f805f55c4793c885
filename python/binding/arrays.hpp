// Arrays of callers as the library sees them.
#ifndef HEADRACE_PYTHON_BINDING_ARRAYS_HPP_
#define HEADRACE_PYTHON_BINDING_ARRAYS_HPP_

#include <cstdint>
#include <memory>
#include <span>

#include "headrace/headrace.h"
#include "object.hpp"

namespace headrace::python {

using Shape = std::span<const std::int64_t>;

inline Shape shape_of(const hr_tensor& tensor) { return {tensor.shape, static_cast<std::size_t>(tensor.ndim)}; }

inline hr_tensor contiguous(void* data, Shape shape, hr_dtype dtype) {
  return hr_tensor_contiguous(data, dtype, static_cast<int>(shape.size()), shape.data());
}

// A tensor without data, from a tuple (shape, name of the dtype), as NumPy and PyTorch call it.
hr_tensor described(const char* name, PyObject* description);

// The arrays of one call: those of NumPy, of PyTorch on one device, or of another library in the memory of the CPU.
// Every array must be of the kind, and on the device, of the first.
class Arrays {
 public:
  virtual ~Arrays() = default;

  // Fills `tensor`, and returns what must stay alive while it is used: the array, or a copy where its layout is none
  // that the library reads. rows: the last dimension must be contiguous.
  virtual Object read(const char* name, PyObject* array, bool rows, hr_tensor& tensor) const = 0;

  // A new contiguous array, not initialised.
  virtual Object empty(Shape shape, hr_dtype dtype, hr_tensor& tensor) const = 0;

  // The same, as `array` is, in whose order of dimensions it is: its memory is contiguous in the order of `like`.
  virtual Object empty_like([[maybe_unused]] PyObject* array, const hr_tensor& like, hr_tensor& tensor) const {
    return empty(shape_of(like), static_cast<hr_dtype>(like.dtype), tensor);
  }

  // Where the call runs.
  virtual void place([[maybe_unused]] hr_attention& attention) const {}

  // What the caller gets for an array that `empty` made.
  virtual Object result(Object array) const { return array; }
};

// TypeError if nothing knows `first`.
std::unique_ptr<Arrays> arrays_of(const char* name, PyObject* first);

// A new array of NumPy, bool, of the shape that a tuple says.
Object empty_mask(PyObject* shape, hr_tensor& tensor);

// One-dimensional int32 metadata, on the host: `values` itself where it is that already, else a copy that the function
// on_host of headrace._lengths makes.
Object read_lengths(const char* name, PyObject* values, hr_tensor& tensor);

}  // namespace headrace::python

#endif  // HEADRACE_PYTHON_BINDING_ARRAYS_HPP_
