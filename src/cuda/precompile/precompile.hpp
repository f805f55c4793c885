// Compiles kernels when the library is built.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "cuda/driver/kernel_source.hpp"

namespace headrace::cuda {

// Compiles the set for standard_architecture, on all cores, and writes it as a pack (precompiled.hpp). The folder
// `store` keeps each cubin under its digest, so that only kernels whose source has changed are compiled. Says on
// standard output what it does. Returns how many kernels it compiled; throws if one cannot be, or if ptxas serialises
// its tensor core instructions.
std::size_t precompile(std::span<const KernelSource> set, const std::string& store, const std::string& pack_path);

}  // namespace headrace::cuda
