// Rows of the caller's tensors, of any element type, into the layouts and the type that the products
// compute in (C: float, or double for float64), and back.
#if defined(HEADRACE_CPU_SIMD_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_PACK_INL_H_
#undef HEADRACE_CPU_SIMD_PACK_INL_H_
#else
#define HEADRACE_CPU_SIMD_PACK_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "describe/element.hpp"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Lanes(d) elements of type T, widened to C.
template <class D>
HWY_INLINE hn::Vec<D> load_widened(D d, const hn::TFromD<D>* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> load_widened(D d, const Float16* p) {
#if HWY_TARGET == HWY_SSE4  // no conversion instructions, and Highway's emulation makes numbers of infinities and NaN
  HWY_ALIGN float values[hn::MaxLanes(D())];
  for (std::size_t n = 0; n < hn::Lanes(d); ++n) values[n] = static_cast<float>(static_cast<double>(p[n]));
  return hn::Load(d, values);
#else
  const hn::Rebind<hwy::float16_t, D> narrow;
  return hn::PromoteTo(d, hn::LoadU(narrow, reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}
template <class D>
HWY_INLINE hn::Vec<D> load_widened(D d, const BFloat16* p) {
  const hn::Rebind<hwy::bfloat16_t, D> narrow;
  return hn::PromoteTo(d, hn::LoadU(narrow, reinterpret_cast<const hwy::bfloat16_t*>(p)));
}

// Rounds to nearest even on the way down.
template <class D>
HWY_INLINE void store_narrowed(D d, hn::Vec<D> v, hn::TFromD<D>* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void store_narrowed(D /*d*/, hn::Vec<D> v, BFloat16* p) {
#if HWY_TARGET == HWY_AVX3_DL
  const __m256bh narrowed = _mm512_cvtneps_pbh(v.raw);
  std::memcpy(static_cast<void*>(p), &narrowed, sizeof(narrowed));
#else
  const hn::Repartition<std::uint32_t, D> du;
  const hn::Repartition<std::int32_t, D> di;
  const hn::Rebind<std::uint16_t, D> narrow;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF)));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));  // rounding could carry a NaN into infinity
  const auto upper = hn::ShiftRight<16>(hn::IfThenElse(is_nan, hn::Or(bits, hn::Set(du, 0x400000)), rounded));
  hn::StoreU(hn::DemoteTo(narrow, hn::BitCast(di, upper)), narrow, reinterpret_cast<std::uint16_t*>(p));
#endif
}
template <class D>
HWY_INLINE void store_narrowed([[maybe_unused]] D d, hn::Vec<D> v, Float16* p) {
#if HWY_TARGET == HWY_SSE4  // no conversion instructions; Highway's truncates
  HWY_ALIGN float values[hn::MaxLanes(D())];
  hn::Store(v, d, values);
  for (std::size_t n = 0; n < hn::Lanes(d); ++n) p[n] = Float16(static_cast<double>(values[n]));
#else
  const hn::Rebind<hwy::float16_t, D> narrow;
  hn::StoreU(hn::DemoteTo(narrow, v), narrow, reinterpret_cast<hwy::float16_t*>(p));
#endif
}

// dst[n] = src[n] for n < size, widened; then zeros to the next multiple of a vector.
template <typename C, typename T>
HWY_INLINE void widen_row(const T* HWY_RESTRICT src, Index size, C* HWY_RESTRICT dst) {
  const Wide<C> d;
  const Index n = lanes<C>();
  Index c = 0;
  for (; c + n <= size; c += n) hn::StoreU(load_widened(d, src + c), d, dst + c);
  if (c < size) {
    T tail[hn::MaxLanes(Wide<C>())] = {};
    std::memcpy(static_cast<void*>(tail), src + c, static_cast<std::size_t>(size - c) * sizeof(T));
    hn::StoreU(load_widened(d, tail), d, dst + c);
  }
}

// dst[n] = factor * src[n] for n < size, rounded to T.
template <typename C, typename T>
HWY_INLINE void narrow_row(const C* HWY_RESTRICT src, C factor, Index size, T* HWY_RESTRICT dst) {
  const Wide<C> d;
  const Index n = lanes<C>();
  const auto scale = hn::Set(d, factor);
  Index c = 0;
  for (; c + n <= size; c += n) store_narrowed(d, hn::Mul(scale, hn::LoadU(d, src + c)), dst + c);
  if (c < size) {
    T tail[hn::MaxLanes(Wide<C>())];
    store_narrowed(d, hn::Mul(scale, hn::LoadU(d, src + c)), tail);
    std::memcpy(static_cast<void*>(dst + c), tail, static_cast<std::size_t>(size - c) * sizeof(T));
  }
}

// Calls f(T*) with data as a pointer to its element type, among those that are computed in C.
template <typename C, typename Void, typename F>
HWY_INLINE void with_elements(Void* data, hr_dtype dtype, F f) {
  using Const = std::is_const<Void>;
  if constexpr (std::is_same_v<C, double>) {
    f(static_cast<std::conditional_t<Const::value, const double*, double*>>(data));
  } else {
    switch (dtype) {
      case HR_FLOAT16:
        return f(static_cast<std::conditional_t<Const::value, const Float16*, Float16*>>(data));
      case HR_BFLOAT16:
        return f(static_cast<std::conditional_t<Const::value, const BFloat16*, BFloat16*>>(data));
      default:
        return f(static_cast<std::conditional_t<Const::value, const float*, float*>>(data));
    }
  }
}

// The caller's rows [0, count) of `size` contiguous elements. Rows of several heads stand one head after
// the other, `inner` rows each.
struct Rows {
  const void* data = nullptr;
  hr_dtype dtype = HR_FLOAT32;
  Index offset = 0, stride = 0, count = 0, size = 0;
  Index inner = 0, outer_stride = 0;  // inner = 0: one head

  [[nodiscard]] Index at(Index r) const {
    return inner == 0 ? offset + r * stride : offset + r / inner * outer_stride + r % inner * stride;
  }
};

// Brings rows [first, last) into the L2 cache. Rows of one head may lie far apart, where no hardware
// prefetcher follows; the kernels ask for the next tile's rows while they work on this one.
HWY_INLINE void prefetch(const Rows& rows, Index first, Index last) {
  const Index element = with_element_type(rows.dtype, [](auto x) { return static_cast<Index>(sizeof(x)); });
  for (Index r = first; r < std::min(last, rows.count); ++r) {
    const char* row = static_cast<const char*>(rows.data) + rows.at(r) * element;
    for (Index byte = 0; byte < rows.size * element; byte += 64) __builtin_prefetch(row + byte, 0, 2);
  }
}

// Columns [p * width, (p + 1) * width) of row r to dst[(p * count + r) * width]: panels that stay in the L1
// cache while the rows of the left operand pass by, whatever the strides of the source. The last panel
// is zeroed up to a vector.
template <typename C>
HWY_NOINLINE void pack_panels(const Rows& rows, Index width, C* dst) {
  with_elements<C>(rows.data, rows.dtype, [&](auto* data) HEADRACE_ATTR {
    for (Index r = 0; r < rows.count; ++r) {
      for (Index c = 0; c < rows.size; c += width) {
        widen_row(data + rows.at(r) + c, std::min(width, rows.size - c), dst + c * rows.count + r * width);
      }
    }
  });
}

// Four rows of four values, transposed: value k of rows 0 ... 3 stands at dst[k * stride].
template <typename T>
HWY_INLINE void transpose_4x4(const T* row0, const T* row1, const T* row2, const T* row3, float factor, float* dst,
                              Index stride) {
  const hn::Full128<float> d;
  const hn::Repartition<double, decltype(d)> pairs;
  const auto scale = hn::Set(d, factor);
  const auto a = load_widened(d, row0), b = load_widened(d, row1);
  const auto c = load_widened(d, row2), e = load_widened(d, row3);
  const auto ab_low = hn::BitCast(pairs, hn::InterleaveLower(d, a, b));
  const auto ab_high = hn::BitCast(pairs, hn::InterleaveUpper(d, a, b));
  const auto ce_low = hn::BitCast(pairs, hn::InterleaveLower(d, c, e));
  const auto ce_high = hn::BitCast(pairs, hn::InterleaveUpper(d, c, e));
  hn::StoreU(hn::Mul(scale, hn::BitCast(d, hn::InterleaveLower(pairs, ab_low, ce_low))), d, dst);
  hn::StoreU(hn::Mul(scale, hn::BitCast(d, hn::InterleaveUpper(pairs, ab_low, ce_low))), d, dst + stride);
  hn::StoreU(hn::Mul(scale, hn::BitCast(d, hn::InterleaveLower(pairs, ab_high, ce_high))), d, dst + 2 * stride);
  hn::StoreU(hn::Mul(scale, hn::BitCast(d, hn::InterleaveUpper(pairs, ab_high, ce_high))), d, dst + 3 * stride);
}

// Groups of `group` rows with their values side by side: value k of row r, times factor, stands at
// dst[(r / group) * size * group + k * group + r % group]. The last group is filled up with zeros.
// This is the left operand of gemm (group = kBlockRows), and with keys as rows its right one (group =
// a panel's width).
template <typename C>
HWY_NOINLINE void pack_transposed(const Rows& rows, C factor, Index group, C* dst) {
  with_elements<C>(rows.data, rows.dtype, [&](auto* data) HEADRACE_ATTR {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    for (Index first = 0; first < rows.count; first += group, dst += rows.size * group) {
      const Index in_group = std::min(group, rows.count - first);
      Index r = 0;
      if constexpr (std::is_same_v<C, float>) {
        for (; r + 4 <= in_group; r += 4) {
          const T* row[4];
          for (Index i = 0; i < 4; ++i) row[i] = data + rows.at(first + r + i);
          Index k = 0;
          for (; k + 4 <= rows.size; k += 4) {
            transpose_4x4(row[0] + k, row[1] + k, row[2] + k, row[3] + k, factor, dst + k * group + r, group);
          }
          for (; k < rows.size; ++k) {
            for (Index i = 0; i < 4; ++i) {
              dst[k * group + r + i] = factor * static_cast<C>(static_cast<double>(row[i][k]));
            }
          }
        }
      }
      for (; r < in_group; ++r) {
        const T* row = data + rows.at(first + r);
        for (Index k = 0; k < rows.size; ++k) {
          dst[k * group + r] = factor * static_cast<C>(static_cast<double>(row[k]));
        }
      }
      if (in_group < group) {
        for (Index k = 0; k < rows.size; ++k) std::fill(dst + k * group + in_group, dst + (k + 1) * group, C{0});
      }
    }
  });
}

// The largest magnitude among `count` values; NaN may be passed over.
template <typename C>
HWY_INLINE C max_magnitude(const C* values, Index count) {
  const Wide<C> d;
  const Index n = lanes<C>();
  auto largest = hn::Zero(d);
  Index c = 0;
  for (; c + n <= count; c += n) largest = hn::Max(hn::Abs(hn::LoadU(d, values + c)), largest);
  C result = hn::GetLane(hn::MaxOfLanes(d, largest));
  for (; c < count; ++c) result = std::max(result, std::abs(values[c]));
  return result;
}

// Whether all of `count` values are finite: x * 0 is 0 for those alone.
template <typename C>
HWY_INLINE bool all_finite(const C* values, Index count) {
  const Wide<C> d;
  const Index n = lanes<C>();
  auto sum = hn::Zero(d);
  Index c = 0;
  for (; c + n <= count; c += n) sum = hn::MulAdd(hn::LoadU(d, values + c), hn::Zero(d), sum);
  C tail{0};
  for (; c < count; ++c) tail += values[c] * C{0};
  return hn::AllTrue(d, hn::Eq(sum, hn::Zero(d))) && tail == C{0};
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
