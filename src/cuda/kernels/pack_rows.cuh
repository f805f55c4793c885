// Copies the rows of a tensor with any strides to where TMA can walk them: side by side, each at a multiple of 16
// bytes.
//
// The compilation defines ELEMENT_BYTES: 2 or 4.
#include "pack_rows_params.hpp"

namespace headrace::cuda {

static_assert(ELEMENT_BYTES == 2 || ELEMENT_BYTES == 4);
template <int kBytes>
struct ElementOf {
  using Type = unsigned short;
};
template <>
struct ElementOf<4> {
  using Type = unsigned;
};
using Element = ElementOf<ELEMENT_BYTES>::Type;  // its bits, whatever they mean

}  // namespace headrace::cuda

// A warp copies a run of rows. The gap behind a row, up to the next multiple of 16 bytes, is left as it is: the map of
// the copy ends at `size`, so that TMA puts zeros there.
extern "C" __global__ void __launch_bounds__(256) pack_rows(const headrace::cuda::PackRowsParams p) {
  using headrace::cuda::Element;
  const int lane = threadIdx.x % 32;
  const long long warp = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const long long first = warp * p.rows_of_warp, last = min(first + p.rows_of_warp, p.all);
  // Divided once: from row to row the position counts on.
  long long head = first % p.heads, row = first / p.heads % p.rows, batch = first / p.heads / p.rows;
  for (long long n = first; n < last; ++n) {
    const Element* from =
        static_cast<const Element*>(p.from) + batch * p.batch_stride + row * p.row_stride + head * p.head_stride;
    Element* to = static_cast<Element*>(p.to) + n * p.pitch;
    for (int i = lane; i < p.size; i += 32) to[i] = from[i];
    if (++head < p.heads) continue;
    head = 0;
    if (++row < p.rows) continue;
    row = 0;
    ++batch;
  }
}
