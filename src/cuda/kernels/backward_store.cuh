// Gradients on their way from registers to device memory.
#pragma once

#include "element.cuh"
#include "hopper_backward_params.hpp"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace headrace::cuda {

constexpr int kPanel = 64;  // columns of a panel of shared memory: 128 bytes

// Rows [first, ...) of head h of sequence b, of `count` rows.
struct TileRows {
  int b, h, first, count;
};

// Stores a warp's 16 rows, `row0` of the tile and on, times factor, by way of the same rows of `room`: panels as TMA
// has them, which nobody reads any more. TMA's stores are not waited for.
template <int kColumns, int kPanels, int kCount>
__device__ inline void store_rows(const float (&values)[kColumns / 2], float factor, Element (&room)[kPanels][kCount],
                                  int row0, const TileRows& rows, const ptx::TensorMap& map,
                                  const GradientRows& gradient) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const unsigned row = ptx::shared_address(room) + (row0 + (lane & 15)) * 128;
#pragma unroll
  for (int g = 0; g < kColumns / 8; g += 2) {
    const int chunk = g % 8 + lane / 16;  // of 16 bytes; swizzled with the row
    const float* x = values + 4 * g;
    ptx::store_matrices(row + (g / 8) * sizeof(room[0]) + ((chunk ^ (lane & 7)) << 4),
                        ptx::pack(x[0] * factor, x[1] * factor), ptx::pack(x[2] * factor, x[3] * factor),
                        ptx::pack(x[4] * factor, x[5] * factor), ptx::pack(x[6] * factor, x[7] * factor));
  }
  ptx::tma_store_fence();
  __syncwarp();
  if (gradient.by_tma != 0) {
    if (lane == 0) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        ptx::tma_store(map, ptx::shared_address(room[panel]) + row0 * 128, panel * kPanel, rows.first + row0, rows.h,
                       rows.b);
      ptx::tma_store_commit();
    }
    return;
  }
#pragma unroll 1
  for (int n = lane; n < 16 * kPanels * kPanel; n += 32) {
    const int r = n / (kPanels * kPanel), c = n % (kPanels * kPanel), i = rows.first + row0 + r;
    if (i < rows.count && c < gradient.columns)
      static_cast<Element*>(
          gradient.to)[rows.b * gradient.strides.s0 + i * gradient.strides.s1 + rows.h * gradient.strides.s2 + c] =
          room[c / kPanel][(row0 + r) * kPanel + ((c % kPanel / 8) ^ (r & 7)) * 8 + c % 8];
  }
}

}  // namespace headrace::cuda
