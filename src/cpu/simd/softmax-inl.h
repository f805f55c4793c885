// The streaming softmax of a block of scores: maxima, exponentials, sums.
#if defined(HEADRACE_CPU_SIMD_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_SOFTMAX_INL_H_
#undef HEADRACE_CPU_SIMD_SOFTMAX_INL_H_
#else
#define HEADRACE_CPU_SIMD_SOFTMAX_INL_H_
#endif

#include <algorithm>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/scores-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/tile_config.hpp"
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

// s[begin, end) = 2^(factor (s - max)), and the sums of that, lane by lane, added to sums. There are two chains of
// sums, for even and odd vectors of the tile: begin is even, so that columns that are left out before it change no bit.
// The weight of the maximum is exactly 1, which a multiply-add instead of difference and product would not keep.
template <typename C>
HWY_INLINE void exponentiate(C* HWY_RESTRICT s, Index begin, Index end, C max, C factor, C* HWY_RESTRICT sums) {
  const Wide<C> d;
  const Index n = lanes<C>();
  const auto m = hn::Set(d, max), f = hn::Set(d, factor);
  auto even = hn::Zero(d), odd = even;
  Index c = begin;
  for (; c + 4 * n <= end; c += 4 * n) {
    hn::Vec<Wide<C>> p[4];
    HEADRACE_UNROLL
    for (int i = 0; i < 4; ++i) p[i] = hn::Mul(hn::Sub(hn::LoadU(d, s + c + i * n), m), f);
    exp2_nonpositive(d, p);
    HEADRACE_UNROLL
    for (int i = 0; i < 4; ++i) hn::StoreU(p[i], d, s + c + i * n);
    even = hn::Add(hn::Add(even, p[0]), p[2]);
    odd = hn::Add(hn::Add(odd, p[1]), p[3]);
  }
  for (; c < end; c += n) {
    hn::Vec<Wide<C>> p[1] = {hn::Mul(hn::Sub(hn::LoadU(d, s + c), m), f)};
    exp2_nonpositive(d, p);
    hn::StoreU(p[0], d, s + c);
    if ((c - begin) / n % 2 == 0) {
      even = hn::Add(even, p[0]);
    } else {
      odd = hn::Add(odd, p[0]);
    }
  }
  hn::StoreU(hn::Add(hn::LoadU(d, sums), hn::Add(even, odd)), d, sums);
}

// The state of the rows of a group: maximum in units of the scores, sums lane by lane, output.
template <typename C>
struct SoftmaxRows {
  C *max, *sums, *out;
  Index ld_out;
};

// Scores of up to kRows rows, a row every tile_stride, to unnormalised probabilities, in place; the rows' state moves
// to the new maxima. factor: log2(e) times the unit of the scores. The rows' maxima are compared, and the factors of
// their states computed, all together: row by row each would wait for the one before it.
template <Index kRows, typename C>
HWY_NOINLINE void softmax_rows(C* HWY_RESTRICT scores, Index rows, Index begin, Index end, C factor,
                               const SoftmaxRows<C>& state) {
  const Wide<C> d;
  const Index n = lanes<C>();
  constexpr Index padded = (kRows + hn::MaxLanes(Wide<C>()) - 1) / hn::MaxLanes(Wide<C>()) * hn::MaxLanes(Wide<C>());
  HWY_ALIGN C tile_max[padded] = {}, old_max[padded] = {}, alpha[padded];
  bool unseen = false;
  for (Index r = 0; r < rows; ++r) {
    tile_max[r] = row_max(scores + r * tile_stride, begin, end);
    old_max[r] = state.max[r];
    unseen = unseen || tile_max[r] == kMinusInf<C>;
  }
  bool skipped[kRows] = {};
  for (Index r = 0; unseen && r < rows; ++r) {
    if (tile_max[r] != kMinusInf<C>) continue;
    // Nothing visible, unless a NaN hides behind the maximum: then the row is NaN.
    C* const s = scores + r * tile_stride;
    const C* found = std::find_if(s + begin, s + end, [](C x) { return x != kMinusInf<C>; });
    skipped[r] = found == s + end;
    if (skipped[r]) {
      std::fill(s + begin, s + end, C{0});
    } else {
      tile_max[r] = *found;
    }
  }
  bool moved = false;
  for (Index r = 0; r < rows; r += n) {
    const auto old = hn::Load(d, old_max + r), seen = hn::Load(d, tile_max + r);
    const auto stays = hn::Le(seen, old);
    hn::Vec<Wide<C>> weight[1] = {hn::Mul(hn::Sub(old, seen), hn::Set(d, factor))};
    exp2_nonpositive(d, weight);
    hn::Store(hn::IfThenElse(stays, old, seen), d, tile_max + r);
    hn::Store(hn::IfThenElse(stays, hn::Set(d, C{1}), weight[0]), d, alpha + r);
    moved = moved || !hn::AllTrue(d, stays);
  }
  for (Index r = 0; r < rows; ++r) {
    state.max[r] = tile_max[r];
    if (moved && alpha[r] != C{1}) {
      const auto kept = hn::Set(d, alpha[r]);
      C *const sums = state.sums + r * n, *const out = state.out + r * state.ld_out;
      hn::StoreU(hn::Mul(kept, hn::LoadU(d, sums)), d, sums);
      for (Index c = 0; c < state.ld_out; c += n) hn::StoreU(hn::Mul(kept, hn::LoadU(d, out + c)), d, out + c);
    }
    if (!skipped[r]) exponentiate(scores + r * tile_stride, begin, end, tile_max[r], factor, state.sums + r * n);
  }
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
