// The SIMD targets that the CPU kernels are compiled for, and the choice among them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace headrace::cpu {

std::string_view chosen_target();
std::vector<std::string> available_targets();  // best first

}  // namespace headrace::cpu
