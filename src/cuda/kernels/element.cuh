// 16-bit numbers, and constants of arithmetic.
//
// Constants of the compilation: FLOAT16: 1 float16, 0 bfloat16.
#pragma once

namespace headrace::cuda {

using Element = unsigned short;  // bfloat16 or float16

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ inline float minus_infinity() { return __int_as_float(static_cast<int>(0xFF800000u)); }
// An infinity that a finite input brought about might end as a p of 0, and pass for a result.
__device__ inline float nan_if_infinite(float x) { return fmaf(x, 0.0f, x); }

__device__ inline float to_float(Element bits) {
  float x;
#if FLOAT16
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
#else
  x = __uint_as_float(static_cast<unsigned>(bits) << 16);
#endif
  return x;
}
// The low one of a pair, or the high one.
__device__ inline float of_pair(unsigned pair, int which) {
  return to_float(static_cast<Element>(which == 0 ? pair & 0xFFFF : pair >> 16));
}
// Rounded to nearest.
__device__ inline Element to_element(float x) {
  Element bits;
#if FLOAT16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#endif
  return bits;
}

}  // namespace headrace::cuda
