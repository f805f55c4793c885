// Builds the plans of kernels.hpp.
#pragma once

#include "cpu/kernels.hpp"

namespace headrace::cpu {

inline Index round_up(Index value, Index multiple) { return (value + multiple - 1) / multiple * multiple; }

// threads: how many may work; decides about the grain of the work, never about results.
ForwardPlan plan_forward(const Problem& problem, const KernelTable& kernels, int threads);
BackwardPlan plan_backward(const Problem& problem, const KernelTable& kernels);

}  // namespace headrace::cpu
