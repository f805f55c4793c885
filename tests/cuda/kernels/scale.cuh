// x[i] = FACTOR * x[i] + offset(i), by way of dynamic shared memory: a kernel to compile, load and launch.
#include "test/offset.cuh"
#include "tiling/tiling.hpp"

extern "C" __constant__ unsigned dynamic_shared_bytes = THREADS * sizeof(float);

extern "C" __global__ void __launch_bounds__(THREADS) scale(float* x, int count) {
  extern __shared__ float staged[];
  const headrace::Index i = blockIdx.x * headrace::Index{THREADS} + threadIdx.x;
  if (i < count) staged[threadIdx.x] = x[i];
  __syncthreads();
  if (i < count) x[i] = FACTOR * staged[threadIdx.x] + offset(i);
}
