// How far from the exact result an element may be: what rounding explains, element by element.
#pragma once

#include "support/dense_call.hpp"

namespace headrace::test {

// Bounds by forward error analysis of streaming attention that keeps scores, statistics and sums in float32
// (float64 for float64), rounds P and dS at most once to dtype before they are multiplied, rebuilds P from
// the lse it stored, and rounds each result once. Constants are a few times what is typical, so a correct
// implementation stays inside and a wrong term, key or factor does not.
//
// exact: the float64 results. Every member has the size of that of exact.
Results error_bounds(const DenseCall& call, const Results& exact, DType dtype, DType lse_dtype, DType bias_dtype);

}  // namespace headrace::test
