// The kernel that copies rows, run as host code: every row arrives, from strides of any sign, however the warps divide
// them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/kernels/pack_rows_params.hpp"

// What the kernel needs of CUDA.
#define ELEMENT_BYTES 2
#define __global__
#define __launch_bounds__(threads)
using std::min;
struct Coordinate {
  unsigned x;
};
static Coordinate blockIdx, threadIdx;
static const Coordinate blockDim{256};
#include "cuda/kernels/pack_rows.cuh"

namespace headrace::cuda {
namespace {

void run(const PackRowsParams& p, unsigned blocks) {
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) pack_rows(p);
}

TEST(PackRows, CopiesEveryRow) {
  constexpr std::int64_t batch = 3, rows = 5, heads = 7;
  for (const int size : {1, 3, 8, 33, 100}) {
    for (const long long rows_of_warp : {1, 2, 6, 35, 200}) {
      SCOPED_TRACE(testing::Message() << size << " elements, " << rows_of_warp << " rows a warp");
      const int pitch = (size + 7) / 8 * 8;
      PackRowsParams p{};
      p.head_stride = -(size + 1);  // the last head comes first
      p.row_stride = 0;             // expanded
      p.batch_stride = heads * (size + 1) + 5;
      p.rows = rows, p.heads = heads, p.all = batch * rows * heads;
      p.size = size, p.pitch = pitch, p.rows_of_warp = rows_of_warp;
      const std::int64_t first = -(heads - 1) * p.head_stride;
      std::vector<std::uint16_t> from(static_cast<std::size_t>(first + (batch - 1) * p.batch_stride + size));
      for (std::size_t n = 0; n < from.size(); ++n) from[n] = static_cast<std::uint16_t>(n);
      constexpr std::uint16_t gap = 0xFFFF;
      std::vector<std::uint16_t> to(static_cast<std::size_t>(p.all * pitch), gap);
      p.from = from.data() + first;
      p.to = to.data();
      run(p, static_cast<unsigned>((p.all + 8 * rows_of_warp - 1) / (8 * rows_of_warp)));
      std::size_t n = 0;
      for (std::int64_t b = 0; b < batch; ++b)
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t h = 0; h < heads; ++h)
            for (int i = 0; i < pitch; ++i, ++n) {
              const std::int64_t at = first + b * p.batch_stride + r * p.row_stride + h * p.head_stride + i;
              ASSERT_EQ(to[n], i < size ? static_cast<std::uint16_t>(at) : gap)
                  << b << ' ' << r << ' ' << h << ' ' << i;
            }
    }
  }
}

}  // namespace
}  // namespace headrace::cuda
