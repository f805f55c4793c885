// Which tensors the tensor memory accelerator (TMA) can walk.
#pragma once

#include <cstdint>
#include <string>

#include "describe/problem.hpp"

namespace headrace::cuda {

// What TMA asks of an address and of every stride, in bytes; strides stay below the largest.
inline constexpr std::int64_t tma_alignment = 16, tma_largest_stride = std::int64_t{1} << 40;

// [batch, rows, heads, size].
struct RowsOfHeads {
  std::int64_t batch = 0, rows = 0, heads = 0, size = 0;
  RowStrides strides;
};

// In bytes. That of a dimension of one entry is never walked: any legal one does.
std::int64_t stride_bytes(std::int64_t size, std::int64_t stride, hr_dtype dtype);

// Throws Failure (HR_ERROR_VALUE) if the data, for which the plan assumes it, is not aligned.
void check_aligned(const char* name, const void* data);

// Which stride keeps TMA from walking this tensor, as a clause; empty if none does.
std::string tma_obstacle(const RowsOfHeads& tensor, hr_dtype dtype);

// A bias of q's type, or its gradient: rows are queries, columns keys.
RowsOfHeads pair_rows(const Problem& problem, const PairStrides& strides);
// Whether TMA can load the bias: its elements have q's type, and the planned data is aligned.
bool tma_walks_bias(const Problem& problem);

}  // namespace headrace::cuda
