// Vector functions: the exponential of the softmax, and the hyperbolic tangent of the softcap.
#if defined(HEADRACE_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_MATH_INL_H_
#undef HEADRACE_CPU_SIMD_MATH_INL_H_
#else
#define HEADRACE_CPU_SIMD_MATH_INL_H_
#endif

#include <type_traits>

#include "cpu/simd/attributes-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// exp(x) for x <= ln(2) or so; 0 where the result would be subnormal, NaN where x is NaN. x = n ln 2 + r
// is split by the rounding of an addition, whose low bits then are the exponent of 2^n.
// float: a minimax polynomial of degree 5 for 2^f with |f| <= 1/2 (relative error 9.2e-8, exact at 0).
template <class D, std::enable_if_t<std::is_same_v<hn::TFromD<D>, float>, int> = 0>
HWY_INLINE hn::Vec<D> exp_nonpositive(D d, hn::Vec<D> x) {
  const hn::Repartition<std::uint32_t, D> du;
  const auto magic = hn::Set(d, 12582912.0f + 127.0f);  // 1.5 * 2^23, and the exponent bias
  const auto y = hn::Mul(x, hn::Set(d, 1.44269504088896341f));
  const auto shifted = hn::Add(y, magic);
  const auto f = hn::Sub(y, hn::Sub(shifted, magic));
  auto p = hn::Set(d, 0.001326472731307149f);
  p = hn::MulAdd(p, f, hn::Set(d, 0.009671512991189957f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.05550733581185341f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.24022242426872253f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.6931470036506653f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, shifted)));
  // A product, not an addition to the exponent: it keeps a NaN of any payload a NaN.
  return hn::IfThenZeroElse(hn::Lt(y, hn::Set(d, -126.0f)), hn::Mul(p, power));
}

// double: the Taylor series of exp(r), |r| <= ln(2) / 2, to degree 13 (truncation error 4e-18), with r
// reduced in two steps.
template <class D, std::enable_if_t<std::is_same_v<hn::TFromD<D>, double>, int> = 0>
HWY_INLINE hn::Vec<D> exp_nonpositive(D d, hn::Vec<D> x) {
  const hn::Repartition<std::uint64_t, D> du;
  const auto magic = hn::Set(d, 6755399441055744.0 + 1023.0);  // 1.5 * 2^52, and the exponent bias
  const auto shifted = hn::Add(hn::Mul(x, hn::Set(d, 1.44269504088896340736)), magic);
  const auto n = hn::Sub(shifted, magic);
  auto r = hn::NegMulAdd(n, hn::Set(d, 0.693147180369123816490), x);  // ln 2 to 32 bits, then the rest
  r = hn::NegMulAdd(n, hn::Set(d, 1.90821492927058770002e-10), r);
  static constexpr double inverse_factorials[] = {1.0 / 6227020800.0,
                                                  1.0 / 479001600.0,
                                                  1.0 / 39916800.0,
                                                  1.0 / 3628800.0,
                                                  1.0 / 362880.0,
                                                  1.0 / 40320.0,
                                                  1.0 / 5040.0,
                                                  1.0 / 720.0,
                                                  1.0 / 120.0,
                                                  1.0 / 24.0,
                                                  1.0 / 6.0,
                                                  1.0 / 2.0,
                                                  1.0,
                                                  1.0};
  auto p = hn::Zero(d);
  for (const double coefficient : inverse_factorials) p = hn::MulAdd(p, r, hn::Set(d, coefficient));
  const auto power = hn::BitCast(d, hn::ShiftLeft<52>(hn::BitCast(du, shifted)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -708.0)), hn::Mul(p, power));
}

// tanh(x). Small arguments keep their relative accuracy (Highway's function goes through expm1);
// NaN and infinities are put right here, since it leaves them unspecified.
template <class D>
HWY_INLINE hn::Vec<D> tanh(D d, hn::Vec<D> x) {
  const auto limit = hn::Set(d, 20);  // tanh is 1 in double precision from 19.1 on
  const auto inside = hn::Lt(hn::Abs(x), limit);
  const auto result = hn::Tanh(d, hn::IfThenElseZero(inside, x));
  const auto saturated = hn::IfThenElse(hn::Ge(hn::Abs(x), limit), hn::CopySign(hn::Set(d, 1), x), x);
  return hn::IfThenElse(inside, result, saturated);
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
