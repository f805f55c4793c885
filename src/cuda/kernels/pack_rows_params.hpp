// The arguments of pack_rows.cuh: read on host and device.
#pragma once

namespace headrace::cuda {

struct PackRowsParams {
  const void* from;  // element (0, 0, 0, 0) of [batch, rows, heads, size]
  void* to;
  long long batch_stride, row_stride, head_stride;  // of `from`, in elements; any sign
  long long rows, heads;
  long long all;  // batch * rows * heads
  int size;       // elements of a row
  int pitch;      // elements from one row of `to` to the next
  long long rows_of_warp;
};

}  // namespace headrace::cuda
