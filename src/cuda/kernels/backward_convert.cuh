// Brings dq from the order in which tensor cores leave it, see hopper_backward.cuh, to the tensor of the caller:
// scaled, in its type. A block of threads takes a query tile.
//
// Constants of the compilation: FLOAT16 and QUERIES as in hopper_backward.cuh; ACCUMULATED: dq was summed onto zeros;
// else a tile that sees no key was never written.
#if FLOAT16
#define HEADRACE_MMA_TYPE "f16"
#else
#define HEADRACE_MMA_TYPE "bf16"
#endif
#define HEADRACE_INDEX int
#include "element.cuh"
#include "hopper_backward_params.hpp"
#include "ptx/math.cuh"
#include "tiling/tiling.hpp"

namespace headrace::cuda {

constexpr int kThreads = 256;                      // 8 warps: those of both warpgroups that made it
constexpr int kHalfFloats = 64 * 64, kGroups = 8;  // of 8 columns, 4 values of a thread
constexpr bool kHalfIsRows = QUERIES == 128;

// A thread has columns 2 q and 2 q + 1 of four groups, q its number in its four; leaves it with all of group q.
__device__ inline void gather_group(unsigned (&x)[4], int q) {
  const auto exchange = [](unsigned& a, unsigned& b, bool upper, int distance) {
    const unsigned other = __shfl_xor_sync(~0u, upper ? a : b, distance);
    (upper ? a : b) = other;
  };
  exchange(x[0], x[1], (q & 1) != 0, 1);
  exchange(x[2], x[3], (q & 1) != 0, 1);
  exchange(x[0], x[2], (q & 2) != 0, 2);
  exchange(x[1], x[3], (q & 2) != 0, 2);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    backward_convert(const __grid_constant__ BackwardConvertParams p) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread / 32 & 3, half = thread / 128;
  const unsigned head = p.query_tiles.quotient(blockIdx.x);
  const int m = static_cast<int>(blockIdx.x - head * p.query_tiles.divisor);
  const int b = static_cast<int>(p.heads_q.quotient(head)), h = static_cast<int>(head - b * p.heads_q.divisor);
  const Visibility vis{{p.forward.band_lo, p.forward.band_hi}, p.forward.seqlen_q, p.forward.seqlen_k, {}};
  const bool written =
      ACCUMULATED || !vis.keys_of_rows({m * QUERIES, min(p.forward.seqlen_q, (m + 1) * QUERIES)}).empty();
  const float4* from = reinterpret_cast<const float4*>(p.dq + static_cast<long long>(blockIdx.x) * 2 * kHalfFloats) +
                       (half * 4 + warp) * kGroups * 32 + lane;
  const int q = lane & 3;
  const int row0 = m * QUERIES + (kHalfIsRows ? 64 * half : 0) + 16 * warp + lane / 4;
#pragma unroll
  for (int four = 0; four < kGroups; four += 4) {
    unsigned rows[2][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float4 x = written ? from[(four + n) * 32] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      rows[0][n] = ptx::pack(x.x * p.scale, x.y * p.scale);
      rows[1][n] = ptx::pack(x.z * p.scale, x.w * p.scale);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      gather_group(rows[r], q);
      const int i = row0 + 8 * r, c = (kHalfIsRows ? 0 : 64 * half) + 8 * (four + q);
      if (i >= p.forward.seqlen_q || c >= p.head_dim) continue;
      Element* to = static_cast<Element*>(p.to) + b * p.strides.s0 + i * p.strides.s1 + h * p.strides.s2 + c;
      if (p.vectors != 0 && c + 8 <= p.head_dim) {
        *reinterpret_cast<uint4*>(to) = make_uint4(rows[r][0], rows[r][1], rows[r][2], rows[r][3]);
      } else {
#pragma unroll
        for (int n = 0; n < 8; ++n)
          if (c + n < p.head_dim) to[n] = static_cast<Element>(rows[r][n / 2] >> 16 * (n & 1));
      }
    }
  }
}

}  // namespace headrace::cuda
