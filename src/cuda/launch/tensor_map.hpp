// Tensors as the tensor memory accelerator (TMA) sees them.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/driver/abi.hpp"
#include "describe/problem.hpp"

namespace headrace::cuda {

// What TMA asks of an address and of every stride, in bytes; strides stay below the largest.
inline constexpr std::int64_t tma_alignment = 16, tma_largest_stride = std::int64_t{1} << 40;

// [batch, rows, heads, size].
struct RowsOfHeads {
  std::int64_t batch = 0, rows = 0, heads = 0, size = 0;
  RowStrides strides;
};

// Which stride keeps TMA from walking this tensor, as a clause; empty if none does.
std::string tma_obstacle(const RowsOfHeads& tensor, hr_dtype dtype);

// Loads boxes of 64 columns x box_rows rows of one head of 16-bit elements, with the 128-byte swizzle; what lies
// outside the tensor becomes 0. Coordinates: column, row, head, batch. Data must be aligned, and nothing an obstacle.
CUtensorMap make_tensor_map(const RowsOfHeads& tensor, hr_dtype dtype, const void* data, int box_rows);

}  // namespace headrace::cuda
