// Splits float32 rows into two float16 parts, whose sum is exact to 2^-22 of a value and to 2^-39 of the largest one of
// its group of rows: what hopper_split_forward.cuh multiplies.
//
// The compilation defines HEAD_DIM, no less than the rows' size, and GROUP_ROWS, no less than the rows of a group.
#include "hopper_split_forward_params.hpp"

namespace headrace::cuda {

constexpr int kWarps = 8, kRowsOfWarp = (GROUP_ROWS + kWarps - 1) / kWarps, kColumnsOfLane = (HEAD_DIM + 31) / 32;

// The bits of x as float16, rounded to nearest.
__device__ inline unsigned short half_bits(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ inline float value_of(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// The maximum, or NaN if there is one.
__device__ inline float maximum(float a, float b) { return a > b || a != a ? a : b; }

__device__ inline float maximum_of_warp(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = maximum(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

__device__ inline void split_group(const SplitTensor& t, int group, float (&largest_of)[kWarps],
                                   float (&row_sum_of)[kWarps]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int head = group / t.groups_of_head % t.heads, batch = group / t.groups_of_head / t.heads;
  const int first = group % t.groups_of_head * t.rows_of_group, end = min(t.rows, first + t.rows_of_group);
  float x[kRowsOfWarp][kColumnsOfLane], largest = 0.0f, row_sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kRowsOfWarp; ++n) {
    const int row = first + warp + n * kWarps;
    const float* from = t.from + batch * t.batch_stride + row * t.row_stride + head * t.head_stride;
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) {
      const int column = lane + 32 * c;
      x[n][c] = row < end && column < t.size ? from[column] : 0.0f;
      largest = maximum(largest, fabsf(x[n][c]));
      sum += fabsf(x[n][c]);
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    row_sum = maximum(row_sum, sum);
  }
  largest_of[warp] = maximum_of_warp(largest);
  row_sum_of[warp] = row_sum;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    largest = maximum(largest, largest_of[w]);
    row_sum = maximum(row_sum, row_sum_of[w]);
  }
  // The unit brings the largest value to [2^14, 2^15). Down to 2^-140, its inverse is no float: it goes in two steps.
  const bool finite = largest - largest == 0.0f;
  const int exponent = finite ? max(-126, ((__float_as_int(largest) >> 23) & 255) - 127) - 14 : 0;
  const int first_step = exponent / 2, second_step = exponent - first_step;
  const auto power_of_two = [](int n) { return __int_as_float((n + 127) << 23); };
  if (threadIdx.x == 0) t.groups[group] = {power_of_two(first_step) * power_of_two(second_step), largest, row_sum};
  const long long head_rows = (static_cast<long long>(batch) * t.heads + head) * t.rows;
  const long long part = static_cast<long long>(t.all_groups / t.groups_of_head) * t.rows * t.pitch;
#pragma unroll
  for (int n = 0; n < kRowsOfWarp; ++n) {
    const int row = first + warp + n * kWarps;
    if (row >= end) break;
    unsigned short* to = t.parts + (head_rows + row) * t.pitch;
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) {
      const int column = lane + 32 * c;
      if (column >= t.size) break;
      const float scaled = x[n][c] * power_of_two(-first_step) * power_of_two(-second_step);
      const unsigned short high = half_bits(scaled);
      to[column] = high;
      to[part + column] = half_bits(scaled - value_of(high));
    }
  }
}

}  // namespace headrace::cuda

extern "C" __global__ void __launch_bounds__(256)
    split_rows(const __grid_constant__ headrace::cuda::SplitRowsParams p) {
  using namespace headrace::cuda;
  __shared__ float largest_of[kWarps], row_sum_of[kWarps];
  int group = static_cast<int>(blockIdx.x), n = 0;
  while (group >= p.tensors[n].all_groups) group -= p.tensors[n++].all_groups;
  split_group(p.tensors[n], group, largest_of, row_sum_of);
}
