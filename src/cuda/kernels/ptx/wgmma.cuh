// Matrix products of a warpgroup (4 warps) on Hopper's tensor cores: D (64 x N, float32, in registers) += A B.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// The compilation defines HEADRACE_MMA_TYPE, the type of A and B: "bf16" or "f16".
//
// Shared-memory operands are tiles in panels of 64 columns (128 bytes a row) with the 128-byte swizzle, as TMA writes
// them: element (row, column) of a tile of R rows lies in panel column / 64, which begins at column / 64 * R * 128
// bytes, and there in row `row`. Panels begin at multiples of 1024 bytes. A 64-bit descriptor names where an operand
// begins:
//
//   bits  0-13  address / 16
//   bits 16-29  leading byte offset / 16: not used where the reduction runs along rows ("K-major", as in Q K^T); the
//               distance of two panels where it runs down columns ("MN-major", as V in P V)
//   bits 32-45  stride byte offset / 16: the distance of two groups of 8 rows, 1024 bytes
//   bits 62-63  1 = 128-byte swizzle
//
// One instruction reduces over 16. Along a row the next 16 lie 32 bytes on, in the next panel after four steps; down
// a column they lie 16 rows, 2048 bytes, on.
#pragma once

namespace headrace::ptx {

// d: row r of the warp's 16 rows (warp w of the warpgroup has rows 16 w to 16 w + 15) and columns 8 g + 2 q, + 1 are
// d[4 g + 2 (r / 8)], d[4 g + 2 (r / 8) + 1] of lane 4 (r % 8) + q.
// ss: a and b are descriptors. rs: a0 to a3 hold the 16 rows x 16 columns of A in the same layout, two values packed in
// each: a0, a1 rows r and r + 8 of columns 0-7, a2, a3 those of columns 8-15.
// kScaleD = 0 overwrites d. kTransB = 1: B is MN-major.
template <int N>
struct Wgmma;

// Only the low half changes from step to step: kept as 32 bits, it costs half the instructions.
__device__ inline unsigned descriptor_low(unsigned shared_address, unsigned leading_bytes) {
  return ((shared_address & 0x3FFFF) >> 4) | ((leading_bytes >> 4) << 16);
}
__device__ inline unsigned long long descriptor(unsigned low) {
  constexpr unsigned high = (1024 >> 4) | (1u << 30);
  unsigned long long whole;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(low), "r"(high));
  return whole;
}

// Before the first product that reads registers which ordinary instructions wrote ("wgmma.fence").
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products ("wgmma.commit_group").
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the groups are under way ("wgmma.wait_group").
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// What was asynchronous until here: keeps the compiler from moving uses of the accumulators before the wait.
template <int kCount>
__device__ inline void pin(float (&values)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) asm volatile("" : "+f"(values[n])::"memory");
}

}  // namespace headrace::ptx

#include "ptx/wgmma_shapes.cuh"
