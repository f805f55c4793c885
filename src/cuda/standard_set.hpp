// The kernels that the build compiles and embeds: what common calls need.
#pragma once

#include <string_view>
#include <vector>

#include "cuda/driver/kernel_source.hpp"

namespace headrace::cuda {

// What they are compiled for.
inline constexpr std::string_view standard_architecture = "sm_90a";

std::vector<KernelSource> standard_set();

}  // namespace headrace::cuda
