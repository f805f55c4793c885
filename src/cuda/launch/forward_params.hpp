// The arguments that the forward kernels share.
#pragma once

#include "cuda/kernels/hopper_forward_params.hpp"
#include "describe/problem.hpp"

namespace headrace::cuda {

// Throws Failure (HR_ERROR_UNSUPPORTED) if the problem has more tiles, or longer sequences, than the kernels count.
void check_size(const Problem& problem);

struct ForwardSchedule {
  std::int64_t query_tiles;   // of a head
  bool paired;                // two of them make a piece of work
  std::int64_t value_chunks;  // that a head's columns of v are worked on in
  int most_blocks;            // of threads
};

// All but the pointers.
HopperForwardParams forward_params(const Problem& problem, const ForwardSchedule& schedule);

void set_pointers(HopperForwardParams& params, const Buffers& buffers);

// Division by d; by 1 where there is nothing to divide.
Divisor divisor(std::int64_t d);

}  // namespace headrace::cuda
