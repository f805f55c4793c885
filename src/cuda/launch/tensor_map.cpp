#include "cuda/launch/tensor_map.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/driver/driver.hpp"

namespace headrace::cuda {
namespace {

constexpr std::int64_t element_bytes = 2, alignment = 16;
constexpr std::int64_t largest_stride = std::int64_t{1} << 40;  // bytes, exclusive

// The stride of a dimension of one entry is never walked: any legal one does.
std::int64_t stride_bytes(std::int64_t size, std::int64_t stride) {
  return size <= 1 ? alignment : stride * element_bytes;
}

}  // namespace

void check_for_tma(const char* name, const RowsOfHeads& t) {
  const auto check_stride = [&](const char* dimension, std::int64_t size, std::int64_t stride) {
    const std::int64_t bytes = stride_bytes(size, stride);
    if (bytes % alignment == 0 && bytes >= 0 && bytes < largest_stride) return;
    throw Failure(HR_ERROR_UNSUPPORTED,
                  fmt::format("{}: the stride of its {} is {} elements; on CUDA it must be a multiple of {} elements, "
                              "not negative and below 2^39",
                              name, dimension, stride, alignment / element_bytes));
  };
  check_stride("batch", t.batch, t.strides.batch);
  check_stride("seqlen", t.rows, t.strides.row);
  check_stride("heads", t.heads, t.strides.head);
}

CUtensorMap make_tensor_map(const char* name, const RowsOfHeads& t, hr_dtype dtype, const void* data, int box_rows) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  if (address % alignment != 0)
    throw Failure(HR_ERROR_UNSUPPORTED,
                  fmt::format("{}: is at {}; on CUDA it must be aligned to {} bytes", name, fmt::ptr(data), alignment));
  constexpr std::uint32_t rank = 4;
  const std::uint64_t sizes[rank] = {static_cast<std::uint64_t>(t.size), static_cast<std::uint64_t>(t.rows),
                                     static_cast<std::uint64_t>(t.heads), static_cast<std::uint64_t>(t.batch)};
  const std::uint64_t strides[rank - 1] = {static_cast<std::uint64_t>(stride_bytes(t.rows, t.strides.row)),
                                           static_cast<std::uint64_t>(stride_bytes(t.heads, t.strides.head)),
                                           static_cast<std::uint64_t>(stride_bytes(t.batch, t.strides.batch))};
  const std::uint32_t box[rank] = {64, static_cast<std::uint32_t>(box_rows), 1, 1};
  constexpr std::uint32_t element_strides[rank] = {1, 1, 1, 1};
  CUtensorMap map{};
  check(driver().cuTensorMapEncodeTiled(
            &map, dtype == HR_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank,
            const_cast<void*>(data), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace headrace::cuda
