// Single instructions of arithmetic that C++ does not name. PTX ISA, "Floating Point Instructions", "cvt", "ldmatrix",
// "stmatrix". The compilation defines HEADRACE_MMA_TYPE.
#pragma once

namespace headrace::ptx {

// "ex2.approx.ftz": 2^x to 2 ulp; 0 for -inf, inf for large x.
__device__ inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// "lg2.approx"
__device__ inline float log2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// "rcp.approx.ftz": 1 / x to 1 ulp; 0 for inf.
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// "min.NaN": NaN if one of them is.
__device__ inline float minimum(float x, float y) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
  return least;
}
// "cvt.rn": two values rounded to the 16-bit type of the products, `low` in the low half.
__device__ inline unsigned pack(float low, float high) {
  unsigned packed;
  asm("cvt.rn." HEADRACE_MMA_TYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// "cvt.rn.satfinite": what is finite stays so.
__device__ inline unsigned pack_finite(float low, float high) {
  unsigned packed;
  asm("cvt.rn.satfinite." HEADRACE_MMA_TYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// "mul": both halves times both halves.
__device__ inline unsigned multiply_packed(unsigned a, unsigned b) {
  unsigned product;
  asm("mul.rn." HEADRACE_MMA_TYPE "x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
// "ldmatrix": four 8 x 8 matrices of 16-bit values; each lane gives the address of a row.
__device__ inline void load_matrices(unsigned (&out)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared)
               : "memory");
}

// Each matrix transposed on its way.
__device__ inline void load_matrices_transposed(unsigned (&out)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared)
               : "memory");
}

// "stmatrix", the same the other way.
__device__ inline void store_matrices(unsigned shared, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
// Each matrix transposed on its way.
__device__ inline void store_matrices_transposed(unsigned shared, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

}  // namespace headrace::ptx
