// The arguments of the kernels for float32: read on host and device.
#pragma once

#include "hopper_forward_params.hpp"

namespace headrace::cuda {

// A group of rows of one head, as split_rows.cuh leaves them: the float32 values are `unit`, a power of two, times the
// sum of two float16 parts. Infinite or NaN if a value is.
struct SplitGroup {
  float unit;
  float largest;  // magnitude
  float row_sum;  // of magnitudes, the largest
};

// float32 rows [batch, rows, heads, size] and where their parts go: [2, batch, heads, rows, pitch], groups [batch,
// heads, groups_of_head].
struct SplitTensor {
  const float* from;
  long long batch_stride, row_stride, head_stride;
  unsigned short* parts;
  SplitGroup* groups;
  int rows, heads, size, pitch;
  int rows_of_group, groups_of_head;
  int all_groups;
};
struct SplitRowsParams {
  SplitTensor tensors[3];  // q, k, v: a block of threads has a group of one of them
};

struct HopperSplitForwardParams {
  HopperForwardParams forward;
  Divisor value_chunks;  // of VALUE_DIM columns: each is a head's tile of its own
  int batch, head_dim;
  int pairs_out;  // two columns of out can be written at a time
  SplitTensor q, k, v;
};

}  // namespace headrace::cuda
