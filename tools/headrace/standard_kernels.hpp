// The element-wise parts of standard attention, vectorised for the SIMD target that the library uses.
#pragma once

#include <cstdint>

#include "headrace/headrace.hpp"

namespace headrace::tool {

// Rows of scores begin at multiples of this many elements, so that whole vectors may be read and written
// up to the end of a row.
inline constexpr std::int64_t score_row_alignment = 16;

struct StandardKernels {
  // Rows of n scores become probabilities in place. Row r shows its first min(n, visible + r * step) keys,
  // at least one.
  void (*softmax)(float* scores, std::int64_t rows, std::int64_t n, std::int64_t stride, std::int64_t visible,
                  std::int64_t step);
  // dp becomes ds = p (dp - sum_j p_j dp_j), in place, row by row.
  void (*softmax_backward)(const float* p, float* dp, std::int64_t rows, std::int64_t n, std::int64_t stride);
  // To float32 and back, rounding to nearest even; dtype is float16 or bfloat16.
  void (*widen)(DType dtype, const void* source, float* target, std::int64_t count);
  void (*narrow)(DType dtype, const float* source, void* target, std::int64_t count);
};

const StandardKernels& standard_kernels();

}  // namespace headrace::tool
