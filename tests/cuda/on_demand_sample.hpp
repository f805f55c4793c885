// Kernels outside the standard set that the tests compile: one of each kind of specialisation.
#pragma once

#include <vector>

#include "cuda/driver/kernel_source.hpp"

namespace headrace::cuda {

std::vector<KernelSource> on_demand_sample();

}  // namespace headrace::cuda
