// Tensors as the tensor memory accelerator (TMA) sees them.
#pragma once

#include "cuda/driver/abi.hpp"
#include "describe/problem.hpp"

namespace headrace::cuda {

// [batch, rows, heads, size] of 16-bit elements.
struct RowsOfHeads {
  std::int64_t batch = 0, rows = 0, heads = 0, size = 0;
  RowStrides strides;
};

// Throws Failure (HR_ERROR_UNSUPPORTED) if TMA cannot walk these strides: it needs multiples of 16 bytes, none of
// them negative.
void check_for_tma(const char* name, const RowsOfHeads& tensor);

// Loads boxes of 64 columns x box_rows rows of one head, with the 128-byte swizzle; what lies outside the tensor
// becomes 0. Coordinates: column, row, head, batch. Throws Failure if data is not aligned to 16 bytes.
CUtensorMap make_tensor_map(const char* name, const RowsOfHeads& tensor, hr_dtype dtype, const void* data,
                            int box_rows);

}  // namespace headrace::cuda
