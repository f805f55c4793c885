// The two passes of the float64 oracle: the plainest attention that is still fast enough for thousands
// of checks. Inputs of any dtype are widened exactly, everything is computed in double, and a result is
// rounded once, to the dtype of its tensor. Results do not depend on the number of threads.
#pragma once

#include "describe/problem.hpp"
#include "reference/workspace.hpp"

namespace headrace::reference {

// k and v of every head, widened into the workspace.
void widen_keys_and_values(const Problem& problem, const Buffers& buffers, const Workspace& workspace, double* base,
                           int threads);

void forward(const Problem& problem, const Buffers& buffers, const Workspace& workspace, double* base, int threads);
void backward(const Problem& problem, const Buffers& buffers, const Workspace& workspace, double* base, int threads);

}  // namespace headrace::reference
