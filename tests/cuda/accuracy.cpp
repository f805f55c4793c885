#include "accuracy.hpp"

#include <algorithm>

namespace headrace::test {

double contract_of(DType dtype) { return dtype == DType::float32 ? 2e-6 : dtype == DType::float16 ? 1e-3 : 8e-3; }

double largest_number(DType dtype) {
  return dtype == DType::float32 ? 0x1.FFFFFEp127 : dtype == DType::float16 ? 65504.0 : 0x1.FEp127;
}

double largest_of(const Values& values) {
  double largest = 0.0;
  for (const double x : values)
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  return largest;
}

double largest_difference(const Values& a, const Values& b) {
  double largest = 0.0;
  for (std::size_t n = 0; n < a.size(); ++n)
    if (a[n] != b[n]) largest = std::max(largest, std::abs(a[n] - b[n]));
  return largest;
}

Call changed(const Spec& spec, const Change& change) {
  return changed(spec, ChangeAll([&](Values& q, Values& k, Values& v, Values&) { change(q, k, v); }));
}

Call changed(const Spec& spec, const ChangeAll& change) {
  Call call = make_call(spec);
  Values q = call.q.values(), k = call.k.values(), v = call.v.values(), dout = call.dout.values();
  change(q, k, v, dout);
  call.q.fill(q);
  call.k.fill(k);
  call.v.fill(v);
  call.dout.fill(dout);
  return call;
}

void multiply(Values& values, double factor) {
  for (double& x : values) x *= factor;
}

void set_first(Values& values, std::int64_t dim, double value) {
  for (std::size_t n = 0; n < values.size(); n += static_cast<std::size_t>(dim)) values[n] = value;
}

}  // namespace headrace::test
