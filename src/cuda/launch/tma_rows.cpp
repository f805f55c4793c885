#include "cuda/launch/tma_rows.hpp"

#include <fmt/format.h>

#include "describe/tensor_view.hpp"

namespace headrace::cuda {

std::int64_t stride_bytes(std::int64_t size, std::int64_t stride, hr_dtype dtype) {
  return size <= 1 ? tma_alignment : stride * dtype_size(dtype);
}

void check_aligned(const char* name, const void* data) {
  if (reinterpret_cast<std::uintptr_t>(data) % tma_alignment != 0)
    throw Failure(HR_ERROR_VALUE,
                  fmt::format("{}: is at {}, but the plan was made for data aligned to {} bytes; make a new plan", name,
                              fmt::ptr(data), tma_alignment));
}

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

RowsOfHeads pair_rows(const Problem& p, const PairStrides& strides) {
  return {.batch = p.batch,
          .rows = p.seqlen_q,
          .heads = p.heads_q,
          .size = p.seqlen_k,
          .strides = {.batch = strides.batch, .row = strides.query, .head = strides.head}};
}

bool tma_walks_bias(const Problem& p) {
  const bool any = p.batch > 0 && p.heads_q > 0 && p.seqlen_q > 0 && p.seqlen_k > 0;
  return p.has_bias && any && p.bias_dtype == p.dtype && p.bias_aligned && p.bias.key == 1 &&
         tma_obstacle(pair_rows(p, p.bias), p.dtype).empty();
}

}  // namespace headrace::cuda
