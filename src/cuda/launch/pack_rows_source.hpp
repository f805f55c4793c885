// The variants of pack_rows.cuh.
#pragma once

#include <vector>

#include "cuda/driver/kernel_source.hpp"

namespace headrace::cuda {

// For elements of 2 or 4 bytes.
KernelSource pack_rows_source(int element_bytes);

// What the build compiles ahead: all there are.
std::vector<KernelSource> pack_rows_standard_set();

}  // namespace headrace::cuda
