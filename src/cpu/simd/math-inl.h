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

template <typename C>
inline constexpr C kLog2E = static_cast<C>(1.44269504088896340736);

// p[i] = a polynomial of f[i], from its highest coefficient on.
template <int kCount, int kTerms, class D>
HWY_INLINE void polynomial(D d, const hn::TFromD<D> (&coefficients)[kTerms], const hn::Vec<D> (&f)[kCount],
                           hn::Vec<D> (&p)[kCount]) {
  HEADRACE_UNROLL
  for (int i = 0; i < kCount; ++i) p[i] = hn::Set(d, coefficients[0]);
  HEADRACE_UNROLL
  for (int n = 1; n < kTerms; ++n) {
    HEADRACE_UNROLL
    for (int i = 0; i < kCount; ++i) p[i] = hn::MulAdd(p[i], f[i], hn::Set(d, coefficients[n]));
  }
}

// x[i] = 2^x[i] for x[i] <= 1 or so; 0 where the result would be subnormal, NaN where x[i] is NaN. Some vectors
// together: their chains of dependent steps overlap (4 take 2/3 of the time of 4 one by one).
// float: a minimax polynomial of degree 5 for 2^f, exact at 0.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
// AVX-512 has instructions that part x into integer and fraction, 0 <= f < 1 (relative error 8.2e-8).
template <int kCount, class D, std::enable_if_t<std::is_same_v<hn::TFromD<D>, float>, int> = 0>
HWY_INLINE void exp2_nonpositive(D d, hn::Vec<D> (&x)[kCount]) {
  constexpr int floor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  static constexpr float coefficients[] = {0.001867130515165627f, 0.009017029777169228f, 0.05579991266131401f,
                                           0.24016444385051727f,  0.6931512951850891f,   1.0f};
  hn::Vec<D> f[kCount], p[kCount];
  HEADRACE_UNROLL
  for (int i = 0; i < kCount; ++i) f[i] = hn::Vec<D>{_mm512_reduce_ps(x[i].raw, floor)};
  polynomial(d, coefficients, f, p);
  HEADRACE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const __mmask16 normal = _mm512_cmp_ps_mask(x[i].raw, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    x[i].raw = _mm512_maskz_scalef_ps(normal, p[i].raw, x[i].raw);
  }
}
#else
// Elsewhere the rounding of an addition parts it, whose low bits then are the exponent of 2^n: |f| <= 1/2
// (relative error 9.2e-8).
template <int kCount, class D, std::enable_if_t<std::is_same_v<hn::TFromD<D>, float>, int> = 0>
HWY_INLINE void exp2_nonpositive(D d, hn::Vec<D> (&x)[kCount]) {
  const hn::Repartition<std::uint32_t, D> du;
  static constexpr float coefficients[] = {0.001326472731307149f, 0.009671512991189957f, 0.05550733581185341f,
                                           0.24022242426872253f,  0.6931470036506653f,   1.0f};
  const auto magic = hn::Set(d, 12582912.0f + 127.0f);  // 1.5 * 2^23, and the exponent bias
  hn::Vec<D> shifted[kCount], f[kCount], p[kCount];
  HEADRACE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    shifted[i] = hn::Add(x[i], magic);
    f[i] = hn::Sub(x[i], hn::Sub(shifted[i], magic));
  }
  polynomial(d, coefficients, f, p);
  HEADRACE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const auto power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, shifted[i])));
    // A product, not an addition to the exponent: it keeps a NaN of any payload a NaN.
    x[i] = hn::IfThenZeroElse(hn::Lt(x[i], hn::Set(d, -126.0f)), hn::Mul(p[i], power));
  }
}
#endif

// double: 2^n times the Taylor series of exp(r), |r| <= ln(2) / 2, to degree 13 (truncation error 4e-18);
// shifted: n as the low bits of the sum with magic_f64.
inline constexpr double magic_f64 = 6755399441055744.0 + 1023.0;  // 1.5 * 2^52, and the exponent bias
template <class D>
HWY_INLINE hn::Vec<D> exp_reduced(D d, hn::Vec<D> r, hn::Vec<D> shifted) {
  const hn::Repartition<std::uint64_t, D> du;
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
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<52>(hn::BitCast(du, shifted))));
}

template <int kCount, class D, std::enable_if_t<std::is_same_v<hn::TFromD<D>, double>, int> = 0>
HWY_INLINE void exp2_nonpositive(D d, hn::Vec<D> (&x)[kCount]) {
  const auto magic = hn::Set(d, magic_f64);
  HEADRACE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const auto shifted = hn::Add(x[i], magic);
    const auto r = hn::Mul(hn::Sub(x[i], hn::Sub(shifted, magic)), hn::Set(d, 0.693147180559945309417));
    x[i] = hn::IfThenZeroElse(hn::Lt(x[i], hn::Set(d, -1021.0)), exp_reduced(d, r, shifted));
  }
}

// exp(x) for x <= ln(2) or so, likewise.
template <class D, std::enable_if_t<std::is_same_v<hn::TFromD<D>, float>, int> = 0>
HWY_INLINE hn::Vec<D> exp_nonpositive(D d, hn::Vec<D> x) {
  hn::Vec<D> y[1] = {hn::Mul(x, hn::Set(d, kLog2E<float>))};
  exp2_nonpositive(d, y);
  return y[0];
}

// double: r is reduced in two steps.
template <class D, std::enable_if_t<std::is_same_v<hn::TFromD<D>, double>, int> = 0>
HWY_INLINE hn::Vec<D> exp_nonpositive(D d, hn::Vec<D> x) {
  const auto magic = hn::Set(d, magic_f64);
  const auto shifted = hn::Add(hn::Mul(x, hn::Set(d, kLog2E<double>)), magic);
  const auto n = hn::Sub(shifted, magic);
  auto r = hn::NegMulAdd(n, hn::Set(d, 0.693147180369123816490), x);  // ln 2 to 32 bits, then the rest
  r = hn::NegMulAdd(n, hn::Set(d, 1.90821492927058770002e-10), r);
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -708.0)), exp_reduced(d, r, shifted));
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
