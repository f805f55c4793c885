// What the pipelines of the backward kernels share: two warpgroups that compute, and one whose first thread loads.
//
// Constants of the compilation: HEAD_DIM, VALUE_DIM, MASK, as in hopper_backward.cuh.
#pragma once

#include "backward_scores.cuh"
#include "backward_store.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace headrace::cuda {

constexpr int kWarpgroups = 2, kThreads = 128 * (kWarpgroups + 1), kWarps = 4 * kWarpgroups;
constexpr int kHeadPanels = (HEAD_DIM + kPanel - 1) / kPanel, kValuePanels = (VALUE_DIM + kPanel - 1) / kPanel;
// Every element is worked on, not just those of tiles at the edges. Dropout is not among them: it needs no care.
constexpr bool kOptions = kFinalScores || MASK;

__device__ inline void init_barrier(unsigned long long& barrier, int arrivals) {
  ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
}

// Known to the compiler to be the same in all lanes.
__device__ inline unsigned uniform(unsigned x) { return __shfl_sync(~0u, x, 0); }

// Rows [row, ...) of head h of sequence b: panels of a map whose boxes have kBoxRows rows.
template <int kBoxRows, int kPanels, int kCount>
__device__ inline void load_panels(Element (&to)[kPanels][kCount], const ptx::TensorMap& map, unsigned barrier, int row,
                                   int h, int b) {
  for (int panel = 0; panel < kPanels; ++panel)
    for (int part = 0; part < kCount; part += kBoxRows * kPanel)
      ptx::tma_load(ptx::shared_address(to[panel] + part), map, barrier, panel * kPanel, row + part / kPanel, h, b);
}

}  // namespace headrace::cuda
