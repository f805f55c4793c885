// The SIMD targets that the CPU kernels are compiled for, and the choice among them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace headrace::cpu {

struct KernelTable;  // kernels.hpp

struct Target {
  std::string_view name;
  bool (*supported)();  // by this machine
  const KernelTable& (*table)();
};

// The supported target that is fastest here, or the one that the environment variable HEADRACE_SIMD names (read once;
// an unknown or unsupported name is an error for every plan).
const Target& chosen();

std::string_view chosen_target();
std::vector<std::string> available_targets();  // best first

}  // namespace headrace::cpu
