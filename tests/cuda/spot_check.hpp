// Gradients of a few queries and keys straight from the definition, in float64: for calls too large for the reference.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "on_gpu.hpp"

namespace headrace::test {

// Compares dq of so many drawn queries, and dk and dv of as many drawn keys, the first and the last ones among them,
// with the gradients that q, k, v, dout, and the out and lse of the forward pass in `results` give. Dense calls without
// dlse. Returns "" or which relative Frobenius error is above `tolerance`, prints all three.
std::string spot_check(const Call& call, const Results& results, std::int64_t count, double tolerance);

}  // namespace headrace::test
