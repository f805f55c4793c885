#include "cuda/launch/tensor_map.hpp"

#include <fmt/format.h>

#include "cuda/driver/driver.hpp"
#include "describe/tensor_view.hpp"

namespace headrace::cuda {
namespace {

// The stride of a dimension of one entry is never walked: any legal one does.
std::int64_t stride_bytes(std::int64_t size, std::int64_t stride, hr_dtype dtype) {
  return size <= 1 ? tma_alignment : stride * dtype_size(dtype);
}

}  // namespace

std::string tma_obstacle(const RowsOfHeads& t, hr_dtype dtype) {
  struct Dimension {
    const char* name;
    std::int64_t size, stride;
  };
  for (const Dimension& d : {Dimension{"batch", t.batch, t.strides.batch}, Dimension{"seqlen", t.rows, t.strides.row},
                             Dimension{"heads", t.heads, t.strides.head}}) {
    const std::int64_t bytes = stride_bytes(d.size, d.stride, dtype);
    if (bytes % tma_alignment != 0 || bytes < 0 || bytes >= tma_largest_stride)
      return fmt::format("the stride of its {} is {} elements, not a multiple of {} from 0 to 2^{}", d.name, d.stride,
                         tma_alignment / dtype_size(dtype), dtype_size(dtype) == 2 ? 39 : 38);
  }
  return "";
}

CUtensorMap make_tensor_map(const RowsOfHeads& t, hr_dtype dtype, const void* data, int box_rows) {
  constexpr std::uint32_t rank = 4;
  const std::uint64_t sizes[rank] = {static_cast<std::uint64_t>(t.size), static_cast<std::uint64_t>(t.rows),
                                     static_cast<std::uint64_t>(t.heads), static_cast<std::uint64_t>(t.batch)};
  const std::uint64_t strides[rank - 1] = {static_cast<std::uint64_t>(stride_bytes(t.rows, t.strides.row, dtype)),
                                           static_cast<std::uint64_t>(stride_bytes(t.heads, t.strides.head, dtype)),
                                           static_cast<std::uint64_t>(stride_bytes(t.batch, t.strides.batch, dtype))};
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

CUtensorMap PlannedTensorMap::at(const void* data) const {
  if (state_.load(std::memory_order_acquire) == First::made) {
    CUtensorMap map = first_;
    if (data != first_data_)
      check(driver().cuTensorMapReplaceAddress(&map, const_cast<void*>(data)), "cuTensorMapReplaceAddress");
    return map;
  }
  const CUtensorMap map = make_tensor_map(tensor_, dtype_, data, box_rows_);
  First expected = First::none;
  if (state_.compare_exchange_strong(expected, First::in_the_making, std::memory_order_relaxed)) {
    first_ = map;
    first_data_ = data;
    state_.store(First::made, std::memory_order_release);
  }
  return map;
}

}  // namespace headrace::cuda
