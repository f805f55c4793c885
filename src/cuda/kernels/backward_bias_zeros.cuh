// Zeros in the gradient of a bias that has an element for every score, where no key tile of hopper_backward.cuh goes. A
// block of threads has a query tile.
//
// Constants of the compilation: those of backward_steps.cuh, as they are for hopper_backward.cuh; and VECTORS: rows are
// stored 16 bytes at a time.
#define HEADRACE_MMA_TYPE "bf16"
#include "backward_steps.cuh"

namespace headrace::cuda {

constexpr int kThreads = 256;
#if BIAS == 2
using Value = float;
#else
using Value = unsigned short;
#endif
#if VECTORS
using Zeros = uint4;
#else
using Zeros = Value;
#endif
constexpr int kElements = sizeof(Zeros) / sizeof(Value), kStoresOfRow = kKeys / kElements;

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
    if (m >= tile.begin && m < tile.end && !is_hidden(p, head, m, tile)) continue;
    const Range keys = tile.keys(p);
    for (int n = static_cast<int>(threadIdx.x); n < rows.size() * kStoresOfRow; n += kThreads) {
      const int i = rows.begin + n / kStoresOfRow, j = keys.begin + n % kStoresOfRow * kElements;
      if (j >= keys.end) continue;
      const long long at = b * strides.batch + head.h * strides.head + i * strides.row + j * strides.key;
      *reinterpret_cast<Zeros*>(static_cast<Value*>(p.dbias) + at) = Zeros{};
    }
  }
}

}  // namespace headrace::cuda
