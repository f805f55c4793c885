// Runs a call on a backend and on the float64 reference and says, in words, where they differ.
#pragma once

#include <functional>
#include <string>

#include "support/dense_call.hpp"
#include "support/error_bounds.hpp"
#include "support/problem.hpp"

namespace headrace::test {

// What a run gave, and what was wrong with its manners: an exception, a write outside the outputs'
// elements or into an input. Empty failure: nothing.
struct Outcome {
  Results results;
  std::string failure;
};

// Forward, then backward with the out and lse of that forward.
Outcome run(Call& call, Backend backend);

// The float64 results.
Results exact_results(const Call& call);

// Compares element by element: NaN with NaN, infinities with their sign, finite within the bounds.
// Returns "" or a description of the worst element of each result that is off.
std::string differences(const Call& call, const Results& got, const Results& exact, const Results& bounds);

// A result's root mean square error in units of its bounds, by member; NaN where it is absent.
struct Errors {
  double out, lse, dq, dk, dv, dbias, dsinks;
};
Errors relative_errors(const Results& got, const Results& exact, const Results& bounds);

// make_call, run on the CPU, compare; "" or what is wrong.
std::string check(const Spec& spec);

// The simplest problem found that `fails` as well; spends about `seconds`.
Spec minimized(Spec spec, const std::function<bool(const Spec&)>& fails, double seconds);

// Runs a call with data of its own; a gtest failure says how it differs from the exact results, if it does.
Results run_and_expect_exact(Call& call, Backend backend);

// Adds a gtest failure that shows the problem, its simplest form and what is wrong, if anything is.
void expect_exact(const Spec& spec);

// |a - b| / |b|, Frobenius.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace headrace::test
