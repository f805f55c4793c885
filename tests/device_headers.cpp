// Compiles, without a standard library, the headers that device code includes: what NVRTC would see, with the
// few names it has by itself. Nothing here runs.
#define __CUDACC__
#define __CUDACC_RTC__
#define __host__
#define __device__
#define HEADRACE_HOST_DEVICE __host__ __device__

float expf(float);
double exp(double);
float logf(float);
double log(double);

#include "describe/dropout.hpp"
#include "headrace/streaming.hpp"
#include "tiling/tiling.hpp"

namespace headrace {

template struct SoftmaxState<float>;
template struct SoftmaxState<double>;
template struct AttentionState<float, 4>;
template struct Moments<float>;
template struct TopK<float, 4>;

bool visible_and_kept(const Visibility& visibility, const Dropout& dropout, Index i, Index j) {
  return visibility.visible(i, j) && dropout.keep(0, 0, i, j);
}

}  // namespace headrace
