// What the launchers of the CUDA backend share.
#pragma once

#include <memory>

#include "plan/kernel.hpp"

namespace headrace::cuda {

std::unique_ptr<Kernel> make_hopper_forward(const Problem& problem, int multiprocessors);

// Throws Failure if a buffer is not memory that the problem's device can reach. Memory of the host that CUDA does not
// know, above all: a kernel would fault on it.
void check_pointers(const Problem& problem, const Buffers& buffers);

}  // namespace headrace::cuda
