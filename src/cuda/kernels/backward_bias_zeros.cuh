// Zeros in the gradient of a bias that has an element for every score, where no key tile of hopper_backward.cuh goes. A
// block of threads has a query tile.
//
// Constants of the compilation: those of backward_steps.cuh, as they are for hopper_backward.cuh.
#define HEADRACE_MMA_TYPE "bf16"
#include "backward_steps.cuh"

namespace headrace::cuda {

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    backward_bias_zeros(const __grid_constant__ HopperBackwardParams p) {
  const unsigned row = p.query_tiles.quotient(blockIdx.x);  // of heads
  const int m = static_cast<int>(blockIdx.x - row * p.query_tiles.divisor);
  const int b = static_cast<int>(p.forward.heads_q.quotient(row));
  const Head head{static_cast<int>(row - b * p.forward.heads_q.divisor), b};
  const HopperForwardParams::Strides4& strides = p.dbias_strides;
  const Range rows = rows_of(p, m);
  for (int n = 0; n < static_cast<int>(p.key_tiles); ++n) {
    KeyTile tile{.n = n, .h = static_cast<int>(p.group.quotient(head.h)), .b = b};
    tile.find_queries(p);
    const Range keys = tile.keys(p);
    const bool visited = m >= tile.begin && m < tile.end &&
                         !(BLOCK_MASK && visibility(p.forward, head).classify(rows, keys) == TileKind::hidden);
    if (visited) continue;
    for (int element = static_cast<int>(threadIdx.x); element < rows.size() * kKeys; element += kThreads) {
      const int i = rows.begin + element / kKeys, j = keys.begin + element % kKeys;
      if (j >= keys.end) continue;
      const long long at = b * strides.batch + head.h * strides.head + i * strides.row + j * strides.key;
      if constexpr (BIAS == 2) {
        static_cast<float*>(p.dbias)[at] = 0.0f;
      } else {
        static_cast<unsigned short*>(p.dbias)[at] = 0;
      }
    }
  }
}

}  // namespace headrace::cuda
