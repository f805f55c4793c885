// The gradient of sinks: minus the sum of exp(sink - lse) D over all rows of a head. One block of threads sums a head,
// always in the same order.
//
// Constants of the compilation: QUERIES, rows of a query tile.
#define HEADRACE_MMA_TYPE "bf16"
#include "hopper_backward_params.hpp"
#include "ptx/math.cuh"

namespace headrace::cuda {

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) backward_sinks(const __grid_constant__ BackwardSinksParams p) {
  const int h = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const double sink = static_cast<double>(p.sinks[h * p.sinks_stride]);
  double sum = 0.0;
  // A sink of -inf is none.
  const bool none = p.sinks[h * p.sinks_stride] == __int_as_float(static_cast<int>(0xFF800000u));
  for (int b = 0; b < p.batch && !none; ++b) {
    const float* rows =
        p.statistics + (static_cast<long long>(b) * p.heads_q + h) * p.query_tiles * statistics_words(QUERIES);
    for (int i = thread; i < p.seqlen_q; i += kThreads) {
      const float* pair = rows + static_cast<long long>(i / QUERIES) * statistics_words(QUERIES) +
                          (i % QUERIES / 2) * (sizeof(RowPair) / sizeof(float)) + (i & 1);
      const double exponent = sink * 1.4426950408889634 + static_cast<double>(pair[0]) * p.to_log2;
      sum += static_cast<double>(ptx::exp2(ptx::minimum(static_cast<float>(exponent), 0.0f))) * pair[2];
    }
  }
  __shared__ double sums[kThreads];
  sums[thread] = sum;
  __syncthreads();
  for (int count = kThreads / 2; count > 0; count /= 2) {
    if (thread < count) sums[thread] += sums[thread + count];
    __syncthreads();
  }
  if (thread == 0) p.dsinks[h * p.dsinks_stride] = static_cast<float>(sums[0]);
}

}  // namespace headrace::cuda
