#include "cpu/simd/target.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "standard_kernels.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include <algorithm>
#include <bit>
#include <limits>

#include "cpu/simd/math-inl.h"
#include "describe/element.hpp"
#include "hwy/highway.h"
#include "standard_kernels.hpp"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::tool::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, score_row_alignment>;
using Vector = hn::Vec<Floats>;

HWY_INLINE std::int64_t lanes() { return static_cast<std::int64_t>(hn::Lanes(Floats())); }

void softmax(float* scores, std::int64_t rows, std::int64_t n, std::int64_t stride, std::int64_t visible,
             std::int64_t step) {
  const Floats d;
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = scores + r * stride;
    const std::int64_t count = std::min(n, visible + r * step);
    // What lies behind the visible scores in their last vector must not count.
    const std::int64_t last = (count - 1) / lanes() * lanes();
    const auto inside = hn::FirstN(d, static_cast<std::size_t>(count - last));
    const Vector hidden = hn::Set(d, -std::numeric_limits<float>::infinity());
    hn::StoreU(hn::IfThenElse(inside, hn::LoadU(d, row + last), hidden), d, row + last);

    Vector most = hidden;
    for (std::int64_t j = 0; j <= last; j += lanes()) most = hn::Max(most, hn::LoadU(d, row + j));
    most = hn::MaxOfLanes(d, most);
    Vector sum = hn::Zero(d);
    for (std::int64_t j = 0; j <= last; j += lanes()) {
      const Vector p = cpu::HWY_NAMESPACE::exp_nonpositive(d, hn::Sub(hn::LoadU(d, row + j), most));
      hn::StoreU(p, d, row + j);
      sum = hn::Add(sum, p);
    }
    const Vector factor = hn::Set(d, 1.0f / hn::GetLane(hn::SumOfLanes(d, sum)));
    for (std::int64_t j = 0; j <= last; j += lanes()) hn::StoreU(hn::Mul(hn::LoadU(d, row + j), factor), d, row + j);
    for (std::int64_t j = last + lanes(); j < n; j += lanes()) hn::StoreU(hn::Zero(d), d, row + j);
  }
}

void softmax_backward(const float* p, float* dp, std::int64_t rows, std::int64_t n, std::int64_t stride) {
  const Floats d;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* p_row = p + r * stride;
    float* row = dp + r * stride;
    const std::int64_t last = (n - 1) / lanes() * lanes();
    const auto inside = hn::FirstN(d, static_cast<std::size_t>(n - last));
    Vector sum = hn::IfThenElseZero(inside, hn::Mul(hn::LoadU(d, p_row + last), hn::LoadU(d, row + last)));
    for (std::int64_t j = 0; j < last; j += lanes())
      sum = hn::MulAdd(hn::LoadU(d, p_row + j), hn::LoadU(d, row + j), sum);
    const Vector delta = hn::SumOfLanes(d, sum);
    for (std::int64_t j = 0; j <= last; j += lanes()) {
      const Vector ds = hn::Mul(hn::LoadU(d, p_row + j), hn::Sub(hn::LoadU(d, row + j), delta));
      hn::StoreU(ds, d, row + j);
    }
  }
}

// Calls convert(j) for vectors that cover 0 ... count - 1; the last overlaps the one before.
template <typename Convert>
HWY_INLINE void cover(std::int64_t count, Convert convert) {
  for (std::int64_t j = 0; j < count; j += lanes()) convert(std::min(j, count - lanes()));
}

template <typename Half>
void widen_halves(const Half* source, float* target, std::int64_t count) {
  const Floats d;
  const hn::Rebind<Half, Floats> halves;
  cover(count,
        [&](std::int64_t j) HWY_ATTR { hn::StoreU(hn::PromoteTo(d, hn::LoadU(halves, source + j)), d, target + j); });
}

void widen(DType dtype, const void* source, float* target, std::int64_t count) {
  if (count < lanes()) {
    for (std::int64_t j = 0; j < count; ++j)
      target[j] = static_cast<float>(load_element(source, static_cast<hr_dtype>(dtype), j));
  } else if (dtype == DType::float16) {
    widen_halves(static_cast<const hwy::float16_t*>(source), target, count);
  } else {
    widen_halves(static_cast<const hwy::bfloat16_t*>(source), target, count);
  }
}

void narrow(DType dtype, const float* source, void* target, std::int64_t count) {
  const Floats d;
  if (count < lanes()) {
    for (std::int64_t j = 0; j < count; ++j)
      store_element(target, static_cast<hr_dtype>(dtype), j, static_cast<double>(source[j]));
  } else if (dtype == DType::float16) {
    auto* halves = static_cast<hwy::float16_t*>(target);
    const hn::Rebind<hwy::float16_t, Floats> half;
    cover(count,
          [&](std::int64_t j) HWY_ATTR { hn::StoreU(hn::DemoteTo(half, hn::LoadU(d, source + j)), half, halves + j); });
  } else {
    // By hand, since Highway's conversion to bfloat16 cuts off. Attention of finite numbers has no NaN.
    auto* halves = static_cast<std::uint16_t*>(target);
    for (std::int64_t j = 0; j < count; ++j) {
      const auto bits = std::bit_cast<std::uint32_t>(source[j]);
      halves[j] = static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    }
  }
}

constexpr StandardKernels kernels = {softmax, softmax_backward, widen, narrow};

const StandardKernels& table() { return kernels; }

}  // namespace headrace::tool::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <string>

#include "nlohmann/json.hpp"

namespace headrace::tool {

const StandardKernels& standard_kernels() {
  static const StandardKernels& chosen = []() -> const StandardKernels& {
    const std::string name = nlohmann::json::parse(info())["simd"]["chosen"];
#if HWY_ARCH_X86
    if (name == "amx" || name == "avx512_bf16") return N_AVX3_DL::table();
    if (name == "avx512") return N_AVX3::table();
    if (name == "avx2") return N_AVX2::table();
    return N_SSE4::table();
#else
    return N_NEON::table();
#endif
  }();
  return chosen;
}

}  // namespace headrace::tool

#endif  // HWY_ONCE
