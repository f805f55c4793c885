// The report of a plan.
#pragma once

#include <cstdint>
#include <string>

#include "plan/kernel.hpp"

namespace headrace {

struct Explanation {
  std::string text, json;
};

// block_mask: its contents if they are there already, else null.
Explanation explain(const Problem& problem, const Kernel& kernel, const std::uint8_t* block_mask);

}  // namespace headrace
