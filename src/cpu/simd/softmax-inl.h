// The streaming softmax of a block of scores: maxima, exponentials, sums.
#if defined(HEADRACE_CPU_SIMD_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_SOFTMAX_INL_H_
#undef HEADRACE_CPU_SIMD_SOFTMAX_INL_H_
#else
#define HEADRACE_CPU_SIMD_SOFTMAX_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/bfloat16-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/scores-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/tile_config.hpp"
#include "describe/element.hpp"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

// The maximum of s[begin, end); NaN may be passed over. Four chains, since one would wait for each maximum.
template <typename C>
HWY_INLINE C row_max(const C* HWY_RESTRICT s, Index begin, Index end) {
  const Wide<C> d;
  const Index n = lanes<C>();
  auto m0 = hn::Set(d, kMinusInf<C>), m1 = m0, m2 = m0, m3 = m0;
  Index c = begin;
  for (; c + 4 * n <= end; c += 4 * n) {
    m0 = hn::Max(hn::LoadU(d, s + c), m0);
    m1 = hn::Max(hn::LoadU(d, s + c + n), m1);
    m2 = hn::Max(hn::LoadU(d, s + c + 2 * n), m2);
    m3 = hn::Max(hn::LoadU(d, s + c + 3 * n), m3);
  }
  for (; c < end; c += n) m0 = hn::Max(hn::LoadU(d, s + c), m0);
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(hn::Max(m0, m1), hn::Max(m2, m3))));
}

// s[begin, end) = 2^(factor (s - max)), and the sums of that, lane by lane, added to `kept` times sums. There are two
// chains of sums, for even and odd vectors of the tile: begin is even, so that columns that are left out before it
// change no bit; end is a multiple of two vectors. The weight of the maximum is exactly 1, which a multiply-add instead
// of difference and product would not keep. weights: s, rounded to bfloat16; or null.
template <typename C>
HWY_INLINE void exponentiate(C* HWY_RESTRICT s, Index begin, Index end, C max, C factor, C kept, C* HWY_RESTRICT sums,
                             [[maybe_unused]] BFloat16* HWY_RESTRICT weights) {
  const Wide<C> d;
  const Index n = lanes<C>();
  const auto m = hn::Set(d, max), f = hn::Set(d, factor);
  auto even = hn::Zero(d), odd = even;
  const auto next = [&]<int kVecs>(Index c, std::integral_constant<int, kVecs>) HEADRACE_ATTR {
    hn::Vec<Wide<C>> p[kVecs];
    HEADRACE_UNROLL
    for (int i = 0; i < kVecs; ++i) p[i] = hn::Mul(hn::Sub(hn::LoadU(d, s + c + i * n), m), f);
    exp2_nonpositive(d, p);
    HEADRACE_UNROLL
    for (int i = 0; i < kVecs; ++i) hn::StoreU(p[i], d, s + c + i * n);
    HEADRACE_UNROLL
    for (int i = 0; i < kVecs; i += 2) {
      even = hn::Add(even, p[i]);
      odd = hn::Add(odd, p[i + 1]);
#if HWY_TARGET == HWY_AVX3_DL
      if constexpr (std::is_same_v<C, float>) {
        if (weights != nullptr) store_rounded(p[i].raw, p[i + 1].raw, weights + c + i * n);
      }
#endif
    }
  };
  Index c = begin;
  for (; c + 4 * n <= end; c += 4 * n) next(c, std::integral_constant<int, 4>());
  for (; c < end; c += 2 * n) next(c, std::integral_constant<int, 2>());
  hn::StoreU(hn::MulAdd(hn::LoadU(d, sums), hn::Set(d, kept), hn::Add(even, odd)), d, sums);
}

// out[r]: the largest lane of vector r of maxima.
template <Index kRows, typename C>
HWY_INLINE void max_of_lanes(const C* HWY_RESTRICT maxima, C* HWY_RESTRICT out) {
  const Wide<C> d;
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  if constexpr (std::is_same_v<C, float> && kRows == 8) {  // all rows together
    const auto two = [&](Index r) HEADRACE_ATTR {
      const __m512 a = hn::Load(d, maxima + r * 16).raw, b = hn::Load(d, maxima + (r + 1) * 16).raw;
      return _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    };
    const auto four = [&](Index r) HEADRACE_ATTR {  // in each block of 128 bits
      const __m512d a = two(r), b = two(r + 2);
      return _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    };
    const __m512 a = four(0), b = four(4);
    const __m512 halves = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    const __m512 all = _mm512_max_ps(halves, _mm512_shuffle_f32x4(halves, halves, 0xB1));
    hn::Store(hn::Vec<Wide<C>>{_mm512_shuffle_f32x4(all, all, 0x88)}, d, out);
    return;
  }
#endif
  for (Index r = 0; r < kRows; ++r) {
    out[r] = hn::GetLane(hn::MaxOfLanes(d, hn::Load(d, maxima + r * lanes<C>())));
  }
}

// The state of the rows of a group: maximum in units of the scores (whole vectors of it are read), sums lane by lane.
template <typename C>
struct SoftmaxRows {
  C *max, *sums;
};

// Whether a row of scores has nothing to see: then they become zeros. A NaN may hide behind the maximum -inf: it then
// becomes the maximum, and all of the row NaN.
template <typename C>
HWY_NOINLINE bool sees_nothing(C* s, Index begin, Index end, C* max) {
  const C* const found = std::find_if(s + begin, s + end, [](C x) { return x != kMinusInf<C>; });
  if (found == s + end) {
    std::fill(s + begin, s + end, C{0});
    return true;
  }
  *max = *found;
  return false;
}

// Scores of up to kRows rows, a row every tile_stride, to unnormalised probabilities, in place; the rows' state moves
// to the new maxima. factor: log2(e) times the unit of the scores. maxima: of the lanes of each row, or null. kept:
// whole vectors of what the output so far of each row is to be multiplied by. The rows' maxima are compared, and the
// factors of their states computed, all together: row by row each would wait for the one before it. weights: the
// probabilities rounded to bfloat16 are to go there too, a row every weight_stride; or null. end: a multiple of two
// vectors.
template <Index kRows, typename C>
HWY_NOINLINE void softmax_rows(C* HWY_RESTRICT scores, Index rows, Index begin, Index end, C factor, const C* maxima,
                               const SoftmaxRows<C>& state, C* HWY_RESTRICT kept, BFloat16* HWY_RESTRICT weights) {
  const Wide<C> d;
  const Index n = lanes<C>();
  constexpr Index padded = (kRows + hn::MaxLanes(Wide<C>()) - 1) / hn::MaxLanes(Wide<C>()) * hn::MaxLanes(Wide<C>());
  HWY_ALIGN C max[padded] = {};
  if (maxima != nullptr) {
    max_of_lanes<kRows>(maxima, max);
  } else {
    for (Index r = 0; r < rows; ++r) max[r] = row_max(scores + r * tile_stride, begin, end);
  }
  bool skipped[kRows] = {};
  for (Index first = 0; first < rows; first += n) {
    const auto unseen = hn::Eq(hn::Load(d, max + first), hn::Set(d, kMinusInf<C>));
    if (hn::AllFalse(d, unseen)) continue;
    for (Index r = first; r < std::min(rows, first + n); ++r) {
      if (max[r] != kMinusInf<C>) continue;
      skipped[r] = sees_nothing(scores + r * tile_stride, begin, end, max + r);
    }
  }
  for (Index r = 0; r < rows; r += n) {
    const auto old = hn::LoadU(d, state.max + r), seen = hn::Load(d, max + r);
    const auto stays = hn::Le(seen, old);
    hn::Vec<Wide<C>> weight[1] = {hn::Mul(hn::Sub(old, seen), hn::Set(d, factor))};
    exp2_nonpositive(d, weight);
    hn::Store(hn::IfThenElse(stays, old, seen), d, max + r);
    hn::StoreU(hn::IfThenElse(stays, hn::Set(d, C{1}), weight[0]), d, kept + r);
  }
  std::copy_n(max, rows, state.max);
  for (Index r = 0; r < rows; ++r) {
    if (skipped[r]) {
      if (weights != nullptr)
        std::fill(weights + r * weight_stride + begin, weights + r * weight_stride + end, BFloat16());
      continue;
    }
    exponentiate(scores + r * tile_stride, begin, end, max[r], factor, kept[r], state.sums + r * n,
                 weights == nullptr ? nullptr : weights + r * weight_stride);
  }
}

// Multiplies rows of the output by what softmax_rows says, for products that add to them as they are.
template <typename C>
HWY_INLINE void keep_output(const C* kept, Index rows, C* out, Index ld_out) {
  const Wide<C> d;
  for (Index r = 0; r < rows; ++r) {
    if (kept[r] == C{1}) continue;
    const auto factor = hn::Set(d, kept[r]);
    C* const row = out + r * ld_out;
    for (Index c = 0; c < ld_out; c += lanes<C>()) hn::StoreU(hn::Mul(factor, hn::LoadU(d, row + c)), d, row + c);
  }
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
