// The accuracy that the library promises, and the comparison of a call with the float64 reference.
#pragma once

#include <string>
#include <vector>

#include "array.hpp"

namespace headrace::tool {

// For inputs like N(0, 1): relative Frobenius error of the outputs (gradients: three times that), and
// absolute error of the LSE.
struct Contract {
  double output, gradient, lse;
};
Contract contract(DType dtype);

struct Comparison {
  std::string tensor;     // "out"
  double error = 0.0;     // relative Frobenius; lse: largest absolute; NaN where only one side is finite
  double allowed = 0.0;   // 0.0 <= error <= allowed is a pass
  double promised = 0.0;  // the contract for inputs like N(0, 1)
  [[nodiscard]] bool ok() const { return error <= allowed; }
};

// Computes the call again in float64 from the exact values of its inputs, and compares every output that
// tensors holds: out and lse, and with backward also dq, dk, dv, dbias, dsinks.
//
// `allowed` is the contract, widened where float32 cannot keep it: a score s is known to |s| 2^-24 only,
// so 2 * 2^-24 * the largest |lse| is allowed (of the lse itself 16 * 2^-24 * that). A result that is smaller
// than sums of such terms are at random has cancelled, to 0 perhaps: its error is relative to the random size.
std::vector<Comparison> compare_with_reference(const Attention& options, const Tensors& tensors, bool backward);

// The tensors of the same call in float64, with the outputs of the reference.
Tensors reference(const Attention& options, const Tensors& tensors, bool backward);

}  // namespace headrace::tool
