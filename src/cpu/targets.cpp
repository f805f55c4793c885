#include "cpu/targets.hpp"

namespace headrace::cpu {

std::string_view chosen_target() { return "none"; }
std::vector<std::string> available_targets() { return {}; }

}  // namespace headrace::cpu
