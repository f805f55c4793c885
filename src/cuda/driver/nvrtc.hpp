// NVRTC, NVIDIA's run-time compiler: libnvrtc, opened at run time. A machine without it is no error until a kernel
// must be compiled.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace headrace::cuda {

// What became of opening NVRTC; decided once in a process.
struct NvrtcStatus {
  int version = 0;    // 1000 * major + 10 * minor, as the driver counts; 0 if there is none
  std::string path;   // the library that was opened
  std::string error;  // why there is none; empty if there is
};

// HEADRACE_NVRTC, a path, is the only place that is looked at if it is set. Else: the names that the dynamic linker
// finds (LD_LIBRARY_PATH, libraries that are loaded already), pip packages beside loaded libraries, CUDA_HOME and
// CUDA_PATH, the usual places of the toolkit.
const NvrtcStatus& nvrtc_status();

// A file that a program includes, under the name that stands in its #include.
struct SourceFile {
  std::string_view name, text;
};

struct Compiled {
  std::string cubin;
  std::string log;  // warnings and ptxas' notes; empty if there are none
};

// Compiles the program `text`, which messages call `name`. Throws Failure (HR_ERROR_RUNTIME) with the compiler's log,
// or with the reason why there is no compiler. Any number of threads may compile at once.
Compiled compile(std::string_view text, const std::string& name, std::span<const SourceFile> headers,
                 std::span<const std::string> options);

}  // namespace headrace::cuda
