// The instructions of ptx/math.cuh, each on many values. Constant: FLOAT16, as in gemm.cuh.
#if FLOAT16
#define HEADRACE_MMA_TYPE "f16"
#else
#define HEADRACE_MMA_TYPE "bf16"
#endif
#include "ptx/math.cuh"

// x, y, exp2, log2, reciprocal: [count] floats; packed, products: [count] pairs of 16 bits, of x and y and of their
// products x * y and y * y.
extern "C" __global__ void arithmetic(const float* x, const float* y, float* exp2, float* log2, float* reciprocal,
                                      unsigned* packed, unsigned* products, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  exp2[i] = headrace::ptx::exp2(x[i]);
  log2[i] = headrace::ptx::log2(y[i]);
  reciprocal[i] = headrace::ptx::reciprocal(x[i]);
  packed[i] = headrace::ptx::pack(x[i], y[i]);
  products[i] = headrace::ptx::multiply_packed(packed[i], headrace::ptx::pack(y[i], y[i]));
}
