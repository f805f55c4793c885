// The accuracy contract, and what its tests change about the inputs of a call.
#pragma once

#include <cmath>
#include <functional>
#include <vector>

#include "on_gpu.hpp"

namespace headrace::test {

using Values = std::vector<double>;

constexpr DType dtypes[] = {DType::bfloat16, DType::float16, DType::float32};

// The largest relative Frobenius error of out for inputs from N(0, 1); of gradients it is three times as large.
double contract_of(DType dtype);
double largest_number(DType dtype);

// Of those that are finite.
double largest_of(const Values& values);
double largest_difference(const Values& a, const Values& b);

// Changes the inputs that make_call drew.
using Change = std::function<void(Values& q, Values& k, Values& v)>;
using ChangeAll = std::function<void(Values& q, Values& k, Values& v, Values& dout)>;
Call changed(const Spec& spec, const Change& change);
Call changed(const Spec& spec, const ChangeAll& change);

void multiply(Values& values, double factor);
// Sets the first element of every vector of `dim`.
void set_first(Values& values, std::int64_t dim, double value);

}  // namespace headrace::test
