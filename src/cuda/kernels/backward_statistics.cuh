// What the backward pass asks of each query row before it begins: see RowPair. Sets its accumulators and counters to
// zero on the way.
//
// Constants of the compilation: FLOAT32, FLOAT16: the type of out and dout: float32, else float16 or bfloat16;
// QUERIES, rows of a query tile; LANES, that share a row: 8 columns for each.
#include "element.cuh"
#include "hopper_backward_params.hpp"

namespace headrace::cuda {

constexpr int kThreads = 256, kRowsAtOnce = kThreads / LANES;
// Beyond this the rounding of an lse is worth more than 2^-2 in an exponent.
constexpr float kLargeLse = 0x1p21f;

// Columns [8 lane, 8 lane + 8) of a row; 0 behind its end.
__device__ inline void load_columns(const BackwardStatisticsParams& p, const void* data, long long at, int lane,
                                    float (&x)[8]) {
  const int columns = p.value_dim - 8 * lane;
#if FLOAT32
  const float* row = static_cast<const float*>(data) + at + 8 * lane;
#pragma unroll
  for (int n = 0; n < 8; ++n) x[n] = n < columns ? row[n] : 0.0f;
#else
  const Element* row = static_cast<const Element*>(data) + at + 8 * lane;
  if (p.vectors != 0 && columns >= 8) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(row);
    const unsigned pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int n = 0; n < 8; ++n)
      x[n] = to_float(static_cast<Element>(n % 2 == 0 ? pairs[n / 2] & 0xFFFF : pairs[n / 2] >> 16));
    return;
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) x[n] = n < columns ? to_float(row[n]) : 0.0f;
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads)
    backward_statistics(const __grid_constant__ BackwardStatisticsParams p) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % LANES;
  const unsigned head = p.query_tiles.quotient(blockIdx.x);
  const int m = static_cast<int>(blockIdx.x - head * p.query_tiles.divisor);
  const int b = static_cast<int>(p.heads_q.quotient(head)), h = static_cast<int>(head - b * p.heads_q.divisor);
  float* to = p.statistics + static_cast<long long>(blockIdx.x) * statistics_words(QUERIES);
  bool large = false;
  for (int r = thread / LANES; r < QUERIES; r += kRowsAtOnce) {
    const int i = m * QUERIES + r;
    const bool inside = i < p.seqlen_q;
    float minus_lse = minus_infinity(), minus_d = 0.0f, d = 0.0f;
    if (inside) {
      float out[8], dout[8];
      load_columns(p, p.out, b * p.out_strides.s0 + i * p.out_strides.s1 + h * p.out_strides.s2, lane, out);
      load_columns(p, p.dout, b * p.dout_strides.s0 + i * p.dout_strides.s1 + h * p.dout_strides.s2, lane, dout);
#pragma unroll
      for (int n = 0; n < 8; ++n) d = fmaf(out[n], dout[n], d);
    }
    for (int distance = LANES / 2; distance > 0; distance /= 2) d += __shfl_xor_sync(~0u, d, distance);
    const float lse = inside ? p.lse[b * p.lse_strides.s0 + h * p.lse_strides.s1 + i * p.lse_strides.s2] : minus_lse;
    if (lse != minus_infinity()) {
      minus_lse = -lse * p.lse_factor;
      minus_d = -d;
      if (p.dlse != nullptr) minus_d += p.dlse[b * p.dlse_strides.s0 + h * p.dlse_strides.s1 + i * p.dlse_strides.s2];
      large = large || !(fabsf(lse) <= kLargeLse);
    }
    if (lane == 0) {
      float* pair = to + (r / 2) * (sizeof(RowPair) / sizeof(float)) + (r & 1);
      pair[0] = minus_lse;
      pair[2] = minus_d;
    }
  }
  const bool any_large = __syncthreads_or(large) != 0;
  if (thread < kTileWords) to[2 * QUERIES + thread] = any_large ? 1.0f : 0.0f;
  if (p.turns != nullptr && thread == 0) {
    p.turns[blockIdx.x] = 0;
    if (blockIdx.x == 0) *p.tickets = 0;
  }
  if (p.dq != nullptr) {
    float4* dq = reinterpret_cast<float4*>(p.dq + static_cast<long long>(blockIdx.x) * p.dq_floats);
    for (int n = thread; n < p.dq_floats / 4; n += kThreads) dq[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

}  // namespace headrace::cuda
