// What the pipelines of the forward kernels share: one warpgroup whose first thread loads, WARPGROUPS that compute, and
// rings of slots in shared memory between them.
//
// Constants of the compilation: WARPGROUPS, HEAD_DIM, VALUE_DIM, as in hopper_forward.cuh.
#pragma once

#include "forward_tiles.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"

namespace headrace::cuda {

constexpr int kThreads = 128 * (WARPGROUPS + 1), kConsumerWarps = 4 * WARPGROUPS;
constexpr int kPanel = 64;  // columns of a panel of shared memory: 128 bytes
constexpr int kHeadPanels = (HEAD_DIM + kPanel - 1) / kPanel, kValuePanels = (VALUE_DIM + kPanel - 1) / kPanel;

// The barriers of slots that the loading thread fills and every computing warp gives back.
template <int kSlots>
__device__ inline void init_slots(unsigned long long (&full)[kSlots], unsigned long long (&empty)[kSlots]) {
  for (int n = 0; n < kSlots; ++n) {
    ptx::mbarrier_init(ptx::shared_address(&full[n]), 1);
    ptx::mbarrier_init(ptx::shared_address(&empty[n]), kConsumerWarps);
  }
}

// A warp gives a slot back.
__device__ inline void release(unsigned long long& empty, int lane) {
  if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty));
}

// A slot's number, known to the compiler to be the same in all lanes.
__device__ inline unsigned uniform(unsigned slot) { return __shfl_sync(~0u, slot, 0); }

// A warp's 16 of 64 rows as the left operand of wgmma in registers, from panels that begin at `shared`.
template <int kSteps>
__device__ inline void load_left_operand(unsigned (&operand)[kSteps][4], unsigned shared, int warp, int lane) {
  const int r = warp * kRowsOfWarp + (lane & 15);
  const unsigned address = shared + r * 128;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int chunk = (step % 4) * 2 + (lane >> 4);  // of 16 bytes; swizzled with the row
    ptx::load_matrices(operand[step], address + (step / 4) * (kRowsOfWarpgroup * 128) + ((chunk ^ (r & 7)) << 4));
  }
}

}  // namespace headrace::cuda
