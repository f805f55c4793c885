// What the backward kernels make of one product q . k.
//
// Constants of the compilation, beside those of options.cuh: SMALL_SCALE, as in hopper_backward.cuh.
#pragma once

#include "options.cuh"

namespace headrace::cuda {

// Scores are brought to their final value in natural units: log2(e) times a score might overflow.
constexpr bool kFinalScores = SOFTCAP || ALIBI || BIAS || !SMALL_SCALE;

// tanh(x), and its derivative to a relative 2^-20: 1 - tanh^2 has no digits left where tanh is near 1.
__device__ inline float tanh_of(float x, float& derivative) {
  const float ratio = tanh_of(x), below = ptx::reciprocal(ptx::exp2(2.0f * kLog2E * fabsf(x)) + 1.0f);
  derivative = fabsf(x) < 0.5f ? fmaf(-ratio, ratio, 1.0f) : 4.0f * below * (1.0f - below);
  return ratio;
}

// What block mask and mask show of two rows, or columns, of a tile, 8 apart: all_visible_by_data() of each.
struct VisibleByData {
  unsigned bits[2];

  __device__ bool operator()(int r, int element) const {
    return !(MASK || BLOCK_MASK) || (bits[r] >> element & 1) != 0;
  }
  // Whether the whole warp sees nothing of a group of 8: it may be passed over. Where there are many options all groups
  // are asked. That keeps the assembler from making everything of all groups at once, for which there are no registers.
  __device__ bool nothing_of(int group) const {
    if constexpr (!kManyOptions || !(MASK || BLOCK_MASK)) return false;
    return __all_sync(~0u, ((bits[0] | bits[1]) >> (2 * group) & 3) == 0);
  }
};
template <int kCount, bool kAlongRow>
__device__ inline VisibleByData visible_of_two(const Params& p, const Head& head, int i, int j) {
  if constexpr (!(MASK || BLOCK_MASK)) return {{~0u, ~0u}};
  return {{all_visible_by_data<kCount, kAlongRow>(p, head, i, j),
           all_visible_by_data<kCount, kAlongRow>(p, head, kAlongRow ? i + 8 : i, kAlongRow ? j : j + 8)}};
}

__device__ inline float slope_of(const Params& p, const Head& head) {
  return ALIBI ? p.alibi_slopes[head.b * p.alibi_batch + head.h * p.alibi_head] : 0.0f;
}

// The bias of query i and key j; of what lies outside the sequence it does not matter.
__device__ inline float bias_near(const Params& p, const Head& head, int i, int j) {
  if constexpr (!BIAS) return 0.0f;
  return bias_of(p, head, min(i, p.seqlen_q - 1), min(j, p.seqlen_k - 1));
}

// p = exp(score - lse) of query i and key j, 0 if the key is hidden, and at most 1, whatever lse's rounding.
// minus_lse: in natural units, or in those of log2 if scores are. derivative: of the softcap. kInside: both are known
// to be in the sequence and the band.
template <bool kInside = false>
__device__ inline float probability_of(const Params& p, float slope, float product, float bias, float minus_lse, int i,
                                       int j, bool visible_by_data, float& derivative) {
  float score = product * (kFinalScores ? scale_of(p) : p.scale * kLog2E);
  derivative = 1.0f;
  if constexpr (SOFTCAP) score = p.softcap * tanh_of(score, derivative);
  if constexpr (BIAS) score = bias == minus_infinity() ? bias : score + bias;
  if constexpr (ALIBI) score -= slope * fabsf(static_cast<float>(distance(p, i, j)));
  const int offset = j - i;
  const bool seen = visible_by_data && (kInside || (j < p.seqlen_k && offset >= p.band_lo && offset <= p.band_hi));
  const float exponent = ptx::minimum(seen ? score + minus_lse : minus_infinity(), 0.0f);
  return ptx::exp2(kFinalScores ? exponent * kLog2E : exponent);
}

// Where p is 0 so is the gradient of the score, even if dout . v is not finite.
__device__ inline float score_gradient(float probability, float dp, float kept, float minus_d, float derivative) {
  return probability == 0.0f ? 0.0f : probability * fmaf(dp, kept, minus_d) * derivative;
}

// Two of them as left operands of products. In float16 an infinite one would make NaN of sums.
__device__ inline unsigned pack_gradients(float low, float high) {
#if FLOAT16
  return ptx::pack_finite(low, high);
#else
  return ptx::pack(low, high);
#endif
}

}  // namespace headrace::cuda
