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
#include "describe/tensor_view.hpp"
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

// Asks for row r, or for all rows, to be in the L2 cache soon.
HWY_INLINE void prefetch_row(const Rows& rows, Index r) {
  constexpr Index line = 64;
  const Index element = static_cast<Index>(dtype_size(rows.dtype));
  const char* const row = static_cast<const char*>(rows.data) + rows.at(r) * element;
  for (Index byte = 0; byte < rows.size * element; byte += line) __builtin_prefetch(row + byte, 0, 2);
}
HWY_INLINE void prefetch_rows(const Rows& rows) {
  for (Index r = 0; r < rows.count; ++r) prefetch_row(rows, r);
}

// The largest magnitude of the vectors that are shown to it; NaN may be passed over.
template <typename C>
struct Magnitude {
  hn::Vec<Wide<C>> largest;
  HWY_INLINE Magnitude() : largest(hn::Zero(Wide<C>())) {}
  HWY_INLINE void see(hn::Vec<Wide<C>> x) { largest = hn::Max(hn::Abs(x), largest); }
  [[nodiscard]] HWY_INLINE C value() const { return hn::GetLane(hn::MaxOfLanes(Wide<C>(), largest)); }
};

// Columns [p * width, (p + 1) * width) of row r to dst[(p * count + r) * width], width: kBlockVecs vectors: panels that
// stay in the L1 cache while the rows of the left operand pass by, whatever the strides of the source. The last panel
// is zeroed up to a vector. Rows [begin, end) only. Returns their largest magnitude; NaN may be passed over.
template <typename C>
HWY_NOINLINE C pack_panels(const Rows& rows, Index begin, Index end, C* dst) {
  const Wide<C> d;
  const Index n = lanes<C>(), width = kBlockVecs * n;
  Magnitude<C> magnitude;
  with_elements<C>(rows.data, rows.dtype, [&](auto* data) HEADRACE_ATTR {
    for (Index r = begin; r < end; ++r) {
      const auto* const row = data + rows.at(r);
      Index c = 0;
      for (; c + n <= rows.size; c += n) {
        const auto values = load_widened(d, row + c);
        magnitude.see(values);
        hn::StoreU(values, d, dst + c / width * width * rows.count + r * width + c % width);
      }
      if (c == rows.size) continue;
      C* const target = dst + c / width * width * rows.count + r * width + c % width;
      widen_row(row + c, rows.size - c, target);
      magnitude.see(hn::LoadU(d, target));
    }
  });
  return magnitude.value();
}

// Elements [k, k + 4) of the rows 0, 4, 8, ... of `rows`, one block of 128 bits each, widened.
template <class D, typename T>
HWY_INLINE hn::Vec<D> load_blocks(D d, const T* const* rows, Index k) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return load_widened(d, rows[0] + k);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, load_blocks(half, rows + hn::MaxLanes(half), k), load_blocks(half, rows, k));
  }
}

// Lanes(d) rows of four values, times factor, transposed: value k of all rows stands at dst[k * stride].
template <class D, typename T>
HWY_INLINE void transpose_rows(D d, const T* const* rows, Index k, hn::Vec<D> factor, float* dst, Index stride,
                               hn::Vec<D>* magnitudes) {
  const hn::Repartition<double, D> pairs;
  const auto row0 = load_blocks(d, rows, k), row1 = load_blocks(d, rows + 1, k);
  const auto row2 = load_blocks(d, rows + 2, k), row3 = load_blocks(d, rows + 3, k);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, row0, row1));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, row0, row1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, row2, row3));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, row2, row3));
  const hn::Vec<D> values[4] = {hn::Mul(factor, hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23))),
                                hn::Mul(factor, hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23))),
                                hn::Mul(factor, hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23))),
                                hn::Mul(factor, hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)))};
  HEADRACE_UNROLL
  for (int i = 0; i < 4; ++i) {
    *magnitudes = hn::Max(hn::Abs(values[i]), *magnitudes);
    hn::StoreU(values[i], d, dst + (k + i) * stride);
  }
}

// transpose_rows for all values of the rows but the last `size` % 4.
template <class D, typename T>
HWY_INLINE float transpose_all(D d, const T* const* rows, Index size, float factor, float* dst, Index stride) {
  const auto scale = hn::Set(d, factor);
  auto magnitudes = hn::Zero(d);
  for (Index k = 0; k + 4 <= size; k += 4) transpose_rows(d, rows, k, scale, dst, stride, &magnitudes);
  return hn::GetLane(hn::MaxOfLanes(d, magnitudes));
}

#undef HEADRACE_TRANSPOSES_16
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#define HEADRACE_TRANSPOSES_16 1
// 16 x 16 elements of 32 bits, transposed.
HWY_INLINE void transpose16(__m512i (&row)[16]) {
  __m512i t[16];
  HEADRACE_UNROLL
  for (int i = 0; i < 16; i += 4) {  // blocks of four rows and four columns
    const __m512i a = _mm512_unpacklo_epi32(row[i], row[i + 1]), b = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(row[i + 2], row[i + 3]), d = _mm512_unpackhi_epi32(row[i + 2], row[i + 3]);
    t[i] = _mm512_unpacklo_epi64(a, c), t[i + 1] = _mm512_unpackhi_epi64(a, c);
    t[i + 2] = _mm512_unpacklo_epi64(b, d), t[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  HEADRACE_UNROLL
  for (int i = 0; i < 4; ++i) {  // then the blocks: t[i], t[i + 4], ... hold column i of each block of columns
    const __m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xDD);
    const __m512i c = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88),
                  d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xDD);
    row[i] = _mm512_shuffle_i32x4(a, c, 0x88), row[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
    row[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), row[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
  }
}

// 16 rows of `size` values, a multiple of 16, times factor, transposed: value k of the first 8 rows stands at first[k *
// stride], that of the others at second[k * stride]. Whole lines of each row are read: rows that lie a power of two
// apart share few sets of the L1 cache. Returns the largest magnitude.
template <typename T>
HWY_INLINE float transpose_16_rows(const T* const* rows, Index size, float factor, float* first, float* second,
                                   Index stride) {
  const Wide<float> d;
  const auto scale = hn::Set(d, factor);
  auto magnitudes = hn::Zero(d);
  for (Index k = 0; k < size; k += 16) {
    __m512i row[16];
    HEADRACE_UNROLL
    for (int i = 0; i < 16; ++i) {
      const auto values = hn::Mul(scale, load_widened(d, rows[i] + k));
      magnitudes = hn::Max(hn::Abs(values), magnitudes);
      row[i] = _mm512_castps_si512(values.raw);
    }
    transpose16(row);
    HEADRACE_UNROLL
    for (int i = 0; i < 16; ++i) {
      const __m512 column = _mm512_castsi512_ps(row[i]);
      if (second == first + 8) {
        _mm512_storeu_ps(first + (k + i) * stride, column);
      } else {
        _mm256_storeu_ps(first + (k + i) * stride, _mm512_castps512_ps256(column));
        _mm256_storeu_ps(second + (k + i) * stride, _mm512_extractf32x8_ps(column, 1));
      }
    }
  }
  return hn::GetLane(hn::MaxOfLanes(d, magnitudes));
}
#else
#define HEADRACE_TRANSPOSES_16 0
#endif

// Groups of `group` rows with their values side by side: value k of row r, times factor, stands at
// dst[(r / group) * size * group + k * group + r % group]. The last group is filled up with zeros.
// This is the left operand of gemm (group = kBlockRows), and with keys as rows its right one (group =
// a panel's width). Rows [begin, end) only. Returns their largest magnitude; NaN may be passed over.
template <typename C>
HWY_NOINLINE C pack_transposed(const Rows& rows, Index begin, Index end, C factor, Index group, C* dst) {
  constexpr Index most = std::is_same_v<C, float> ? hn::MaxLanes(Wide<C>()) : 1;  // rows that are transposed at once
  C magnitude = 0;
  with_elements<C>(rows.data, rows.dtype, [&](auto* data) HEADRACE_ATTR {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    const auto pack_rest = [&](const T* row, Index first, C* target) HEADRACE_ATTR {
      for (Index k = first; k < rows.size; ++k) {
        const C value = factor * static_cast<C>(static_cast<double>(row[k]));
        target[k * group] = value;
        magnitude = std::max(magnitude, std::abs(value));
      }
    };
    for (Index r = begin; r < end;) {
      C* const target = dst + r / group * rows.size * group + r % group;
#if HEADRACE_TRANSPOSES_16
      if constexpr (std::is_same_v<C, float>) {
        if (end - r >= 16 && r % 16 == 0 && (group == 8 || group % 16 == 0)) {
          const T* row[16];
          for (Index i = 0; i < 16; ++i) row[i] = data + rows.at(r + i);
          const Index packed = rows.size / 16 * 16;
          float* const second = group == 8 ? target + rows.size * group : target + 8;
          magnitude = std::max(magnitude, transpose_16_rows(row, packed, factor, target, second, group));
          for (Index i = 0; i < 16; ++i) pack_rest(row[i], packed, i < 8 ? target + i : second + i - 8);
          r += 16;
          continue;
        }
      }
#endif
      const Index in_group = std::min(end - r, group - r % group);
      const Index together = in_group >= most ? most : in_group >= 4 && most > 4 ? 4 : 1;
      const T* row[most];
      for (Index i = 0; i < together; ++i) row[i] = data + rows.at(r + i);
      Index packed = 0;
      if constexpr (most > 1) {
        if (together > 1) packed = rows.size / 4 * 4;
        // NOLINTNEXTLINE(bugprone-branch-clone): they are the same where a vector has 128 bits
        if (together == most) {
          magnitude = std::max(magnitude, transpose_all(Wide<C>(), row, rows.size, factor, target, group));
        } else if (together == 4) {
          magnitude = std::max(magnitude, transpose_all(hn::Full128<C>(), row, rows.size, factor, target, group));
        }
      }
      for (Index i = 0; i < together; ++i) pack_rest(row[i], packed, target + i);
      r += together;
    }
    const Index used = rows.count % group;
    if (end < rows.count || used == 0) return;
    C* const last = dst + rows.count / group * rows.size * group;
    for (Index k = 0; k < rows.size; ++k) std::fill(last + k * group + used, last + (k + 1) * group, C{0});
  });
  return magnitude;
}

template <typename C>
HWY_INLINE C pack_transposed(const Rows& rows, C factor, Index group, C* dst) {
  return pack_transposed(rows, 0, rows.count, factor, group, dst);
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
