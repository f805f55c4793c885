#include "cuda/standard_set.hpp"

namespace headrace::cuda {

std::vector<KernelSource> standard_set() { return {}; }

}  // namespace headrace::cuda
