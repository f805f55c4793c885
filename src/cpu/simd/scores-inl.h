// What happens to a row of scores between q . k and the softmax: softcap, bias, ALiBi, masks, in the
// order that headrace.h states. Shared by the forward and the backward pass.
#if defined(HEADRACE_CPU_SIMD_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_SCORES_INL_H_
#undef HEADRACE_CPU_SIMD_SCORES_INL_H_
#else
#define HEADRACE_CPU_SIMD_SCORES_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/pack-inl.h"
#include "cpu/tile_config.hpp"
#include "describe/dropout.hpp"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <typename C>
inline constexpr C kMinusInf = -std::numeric_limits<C>::infinity();

// How a score comes about: q is multiplied by `before`, the product with k by `after`, and what then stands in the
// tile is a score in units of `unit`: exponentials and lse multiply by that, which costs nothing. A scale that shrinks
// does so before the product and one that grows after it, so that neither overflows where the score itself does not;
// before is a power of two, so that q keeps its bits, and 1 <= unit < 2. Where more happens to scores than masks, they
// are brought to units of 1.
template <typename C>
struct Scaling {
  C before = 1, after = 1, unit = 1;
  explicit Scaling(const Problem& p) {
    before = static_cast<C>(std::copysign(1.0, p.scale));
    const double magnitude = std::abs(p.scale);
    if (magnitude > 1.0) {
      after = static_cast<C>(magnitude);
      return;
    }
    int exponent = 0;
    const C fraction = static_cast<C>(2 * std::frexp(magnitude, &exponent));
    before *= static_cast<C>(magnitude == 0.0 ? 0.0 : std::ldexp(1.0, exponent - 1));
    const bool masks_alone = p.softcap == 0.0 && !p.has_bias && !p.has_alibi;
    (masks_alone ? unit : after) = magnitude == 0.0 ? C{1} : fraction;
  }
};

// One query head of one sequence, with all that its scores depend on beside q and k.
template <typename C>
struct ScoreRules {
  const Problem& problem;
  const Buffers& buffers;
  Index b, h;
  Visibility vis;
  Scaling<C> scaling;
  C slope = 0;

  ScoreRules(const Problem& p, const Buffers& bufs, Index sequence, Index head)
      : problem(p), buffers(bufs), b(sequence), h(head), vis(visibility(p, bufs, sequence, head)), scaling(p) {
    if (p.has_alibi) slope = static_cast<C>(bufs.alibi_slopes[b * p.alibi_batch_stride + h * p.alibi_head_stride]);
  }

  // Whether elements of a tile may be hidden one by one.
  [[nodiscard]] bool hides(TileKind kind) const {
    return kind == TileKind::edge || problem.has_mask || problem.has_bias;
  }

  // Whether the scores need more than the product.
  [[nodiscard]] bool plain(TileKind kind) const {
    return !hides(kind) && scaling.after == C{1} && problem.softcap == 0.0 && !problem.has_alibi;
  }

  [[nodiscard]] bool visible(Index i, Index j) const {
    if (!vis.visible(i, j)) return false;
    if (problem.has_mask && buffers.mask[problem.mask.at(b, h, i, j)] == 0) return false;
    return !problem.has_bias ||
           load_element(buffers.bias, problem.bias_dtype, problem.bias.at(b, h, i, j)) != kMinusInf<double>;
  }
};

// Elements [0, count) of a strided row, widened to C.
template <typename C>
HWY_INLINE void gather_row(const void* data, hr_dtype dtype, Index offset, Index stride, Index count, C* dst) {
  with_element_type(dtype, [&](auto zero) HEADRACE_ATTR {
    using T = decltype(zero);
    const T* src = static_cast<const T*>(data) + offset;
    if (stride == 1) {
      if constexpr (std::is_same_v<T, C>) {
        std::memcpy(dst, src, static_cast<std::size_t>(count) * sizeof(T));
        return;
      } else if constexpr (std::is_same_v<C, float> && !std::is_same_v<T, double>) {
        widen_row(src, count, dst);
        return;
      }
    }
    for (Index c = 0; c < count; ++c) dst[c] = static_cast<C>(static_cast<double>(src[c * stride]));
  });
}

// Finishes the scores s[begin, end) of row i against keys j0 + c. begin is a multiple of a vector;
// afterwards hidden elements, and those from end to the next multiple of a vector, are -inf. With
// softcap, slope_out (if not null) receives its derivative 1 - tanh^2. temp: a row of tile_stride.
template <typename C>
HWY_NOINLINE void finish_scores(const ScoreRules<C>& rules, TileKind kind, Index i, Index j0, Index begin, Index end,
                                C* HWY_RESTRICT s, C* HWY_RESTRICT slope_out, C* HWY_RESTRICT temp) {
  const Wide<C> d;
  const Index n = lanes<C>();
  const Problem& p = rules.problem;
  const auto minus_inf = hn::Set(d, kMinusInf<C>);

  if (rules.scaling.after != C{1}) {
    const auto scale = hn::Set(d, rules.scaling.after);
    for (Index c = begin; c < end; c += n) hn::StoreU(hn::Mul(scale, hn::LoadU(d, s + c)), d, s + c);
  }
  if (p.softcap > 0.0) {
    const auto cap = hn::Set(d, static_cast<C>(p.softcap));
    for (Index c = begin; c < end; c += n) {
      const auto t = tanh(d, hn::Div(hn::LoadU(d, s + c), cap));
      hn::StoreU(hn::Mul(cap, t), d, s + c);
      if (slope_out != nullptr) hn::StoreU(hn::NegMulAdd(t, t, hn::Set(d, 1)), d, slope_out + c);
    }
  }
  if (p.has_bias) {
    gather_row(rules.buffers.bias, p.bias_dtype, p.bias.at(rules.b, rules.h, i, j0 + begin), p.bias.key, end - begin,
               temp + begin);
    for (Index c = begin; c < end; c += n) {
      const auto bias = hn::LoadU(d, temp + c);
      const auto sum = hn::Add(hn::LoadU(d, s + c), bias);
      hn::StoreU(hn::IfThenElse(hn::Eq(bias, minus_inf), minus_inf, sum), d, s + c);  // hides a NaN too
    }
  }
  if (p.has_alibi) {
    // |i + shift - j| from the distance at the tile's first key: exact in float below 2^24.
    const auto slope = hn::Set(d, rules.slope);
    auto distance =
        hn::Sub(hn::Set(d, static_cast<C>(i + rules.vis.seqlen_k - rules.vis.seqlen_q - j0 - begin)), hn::Iota(d, 0));
    const auto step = hn::Set(d, static_cast<C>(n));
    for (Index c = begin; c < end; c += n) {
      hn::StoreU(hn::NegMulAdd(slope, hn::Abs(distance), hn::LoadU(d, s + c)), d, s + c);
      distance = hn::Sub(distance, step);
    }
  }
  if (p.has_mask) {
    const std::uint8_t* mask = rules.buffers.mask + p.mask.at(rules.b, rules.h, i, j0);
    if (p.mask.key == 1) {
      for (Index c = begin; c < end; ++c) s[c] = mask[c] != 0 ? s[c] : kMinusInf<C>;
    } else {
      for (Index c = begin; c < end; ++c) s[c] = mask[c * p.mask.key] != 0 ? s[c] : kMinusInf<C>;
    }
  }
  if (kind == TileKind::edge) {
    const Band& band = rules.vis.band;
    const Index first = std::clamp<Index>(i + band.lo - j0, begin, end);
    const Index last = std::clamp<Index>(i + band.hi + 1 - j0, first, end);
    std::fill(s + begin, s + first, kMinusInf<C>);
    std::fill(s + last, s + end, kMinusInf<C>);
    const BlockMask& blocks = rules.vis.blocks;
    if (blocks.bits != nullptr) {
      const unsigned char* bits = blocks.bits + (i / blocks.block_q) * blocks.stride_q;
      for (Index c = first; c < last;) {
        const Index block = (j0 + c) / blocks.block_k;
        const Index next = std::min<Index>(last, (block + 1) * blocks.block_k - j0);
        if (bits[block * blocks.stride_k] == 0) std::fill(s + c, s + next, kMinusInf<C>);
        c = next;
      }
    }
  }
  std::fill(s + end, s + begin + (end - begin + n - 1) / n * n, kMinusInf<C>);
}

// factors[begin, end) of row i: 1 / (1 - rate) where the element is kept, else 0. One Philox call gives
// two rows of two keys; keys of a tile begin at an even index.
template <typename C>
HWY_NOINLINE void dropout_factors(const Dropout& dropout, Index b, Index h, Index i, Index j0, Index begin, Index end,
                                  C* HWY_RESTRICT factors) {
  const hn::ScalableTag<std::uint32_t> du;
  const Index n = static_cast<Index>(hn::Lanes(du));
  const std::uint32_t threshold = dropout.threshold();
  const C kept = static_cast<C>(dropout.kept_scale());
  const auto m0 = hn::Set(du, Philox::multiplier0), m1 = hn::Set(du, Philox::multiplier1);
  // High and low halves of the products of all lanes, from the even and the odd ones.
  const auto multiply = [du](auto a, auto m, auto* high, auto* low) HEADRACE_ATTR {
    const auto even = hn::MulEven(a, m);
    const auto odd =
        hn::MulEven(hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(hn::RepartitionToWide<decltype(du)>(), a))), m);
    *low = hn::Mul(a, m);
    *high = hn::OddEven(hn::BitCast(du, odd), hn::BitCast(du, hn::ShiftRight<32>(even)));
  };
  for (Index c = begin & ~Index{1}; c < end; c += 2 * n) {
    auto c0 = hn::Iota(du, static_cast<std::uint32_t>((j0 + c) >> 1));
    auto c1 = hn::Set(du, static_cast<std::uint32_t>(i >> 1));
    auto c2 = hn::Set(du, static_cast<std::uint32_t>(h)), c3 = hn::Set(du, static_cast<std::uint32_t>(b));
    std::uint32_t k0 = static_cast<std::uint32_t>(dropout.seed);
    std::uint32_t k1 = static_cast<std::uint32_t>(dropout.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      hn::Vec<decltype(du)> high0, low0, high1, low1;
      multiply(c0, m0, &high0, &low0);
      multiply(c2, m1, &high1, &low1);
      c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(du, k0));
      c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(du, k1));
      c1 = low1;
      c3 = low0;
      k0 += Philox::weyl0;
      k1 += Philox::weyl1;
    }
    HWY_ALIGN std::uint32_t words[2][hn::MaxLanes(hn::ScalableTag<std::uint32_t>())];
    hn::Store((i & 1) != 0 ? c2 : c0, du, words[0]);
    hn::Store((i & 1) != 0 ? c3 : c1, du, words[1]);
    const Index count = std::min(2 * n, end - c);
    for (Index e = 0; e < count; ++e) factors[c + e] = words[e & 1][e >> 1] >= threshold ? kept : C{0};
  }
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
