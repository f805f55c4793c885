#include "cuda/standard_set.hpp"

#include "cuda/launch/hopper_forward_source.hpp"

namespace headrace::cuda {

std::vector<KernelSource> standard_set() { return hopper_forward_standard_set(); }

}  // namespace headrace::cuda
