// Attention as everybody writes it first: all scores of a row, their maximum, exp, sum, then times V.
// The yardstick of the accuracy contract.
#pragma once

#include "support/dense_call.hpp"

namespace headrace::test {

// Forward and backward with scores and sums in Real (float or double), P and dS rounded to `dtype` before
// they are multiplied, and results rounded to it.
template <typename Real>
Results standard_attention(const DenseCall& call, DType dtype, DType lse_dtype);

// With the arithmetic that suits the call's dtype: float64 for float64, else float32.
Results standard_attention(const Call& call);

}  // namespace headrace::test
