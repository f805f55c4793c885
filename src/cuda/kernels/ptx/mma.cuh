// Matrix products of a warp. PTX ISA, "mma.sync".
#pragma once

namespace headrace::ptx {

// What a tf32 product takes of a float: the sign, the exponent and 10 bits behind the first.
__device__ inline float cut_to_tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u); }
// "mma.m16n8k8": d (16 x 8) += a (16 x 8) b (8 x 8). Lane 4 g + t has rows g and g + 8 of a, in columns t (a0, a1) and
// t + 4 (a2, a3); column g of b, in rows t and t + 4; rows g (d0, d1) and g + 8 of d, in columns 2 t and 2 t + 1.
__device__ inline void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

}  // namespace headrace::ptx
