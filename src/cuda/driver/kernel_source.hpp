// A kernel before it is compiled: which file, which entry, which constants. The files are part of the library.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/driver/nvrtc.hpp"

namespace headrace::cuda {

// `entry` is an extern "C" __global__ function of `file`, a name relative to src/cuda/kernels ("hopper_forward.cuh").
// The constants are macros of its compilation, in this order. A file includes others by their names relative to
// src/cuda/kernels ("ptx/wgmma.cuh"), to src ("tiling/tiling.hpp") or to include ("headrace/streaming.hpp").
//
// A kernel that works in dynamic shared memory says how much:
//   extern "C" __constant__ unsigned dynamic_shared_bytes = sizeof(Shared);
struct KernelSource {
  std::string entry, file;
  std::vector<std::pair<std::string, long long>> constants;
  bool operator==(const KernelSource&) const = default;
};

// "hopper_forward<HEAD_DIM=128, KEYS=128>": for messages and tables. Constants of value 0, options that are not in
// use, are left out.
std::string name_of(const KernelSource& source);

// The files that are part of the library, written by the build from the list in cmake/Cuda.cmake.
std::span<const SourceFile> embedded_sources();

// Makes more files known, which must stay where they are as long as the process lives: the kernels of tests.
void add_sources(std::span<const SourceFile> files);

// The file of the kernel, first, and all that it includes. Throws Failure if a file is not known.
std::vector<SourceFile> sources_of(const KernelSource& source);

// The compiler's options for an architecture ("sm_90a").
std::vector<std::string> options_of(const KernelSource& source, const std::string& architecture);

// The digest of all that determines the kernel, but for the compiler's version: the text of every file that it
// includes, entry, constants, options.
std::string digest_of(const KernelSource& source, const std::string& architecture);

// Compiles it. The log has ptxas' account of registers and spills if `verbose`; the code is the same.
Compiled compile(const KernelSource& source, const std::string& architecture, bool verbose = false);

}  // namespace headrace::cuda
