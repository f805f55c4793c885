// What the variants of the kernels depend on alike.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "describe/problem.hpp"

namespace headrace::cuda {

using Constants = std::vector<std::pair<std::string, long long>>;

// The options in use, as constants of the compilation: of a problem, and of none. loads_bias: the kernel loads the bias
// by TMA.
Constants option_constants(const Problem& problem, bool loads_bias = false);
Constants plain_constants();

// Whether 0 < scale <= ln(2): then scale * log2(e) <= 1, and may be folded into an exponent of base 2.
bool has_small_scale(const Problem& problem);

// Whether a causal mask or a window hides keys, so that a head's query tiles see different numbers of them.
bool is_banded(const Problem& problem);

// Tiles are chosen as if the device had so many multiprocessors, if not 0: tests reach every variant by small problems.
inline thread_local int pretended_multiprocessors = 0;
int multiprocessors_to_fill(int multiprocessors);

}  // namespace headrace::cuda
