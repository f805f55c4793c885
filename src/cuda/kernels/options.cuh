// What the options of attention say of one score, and which scores they leave visible: what every kernel asks.
//
// Constants of the compilation: FLOAT16 (the type of a bias that has the type of q), SOFTCAP, ALIBI, BIAS, MASK,
// BLOCK_MASK, DROPOUT, as in hopper_forward.cuh.
#pragma once

#define HEADRACE_INDEX int
#define HEADRACE_ROLLED _Pragma("unroll 1")
#include "describe/dropout.hpp"
#include "element.cuh"
#include "hopper_forward_params.hpp"
#include "ptx/math.cuh"
#include "tiling/tiling.hpp"

namespace headrace::cuda {

using Params = HopperForwardParams;

// The options in use that take much code for each element. Where there are many, kernels work on a block's elements in
// turns, by one loop over the same registers: unrolled they would be twice as long, and take the compiler as much
// longer.
constexpr int kLongOptions =
    (SOFTCAP != 0) + (ALIBI != 0) + (BIAS != 0) + (MASK != 0) + (BLOCK_MASK != 0) + (DROPOUT != 0);
constexpr bool kManyOptions = kLongOptions > 2;
constexpr int element_turns(int of_many_options) { return kManyOptions ? of_many_options : 1; }

template <typename T>
__device__ inline void assign(T& to, const T& from) {
  to = from;
}
template <typename T, int kCount>
__device__ inline void assign(T (&to)[kCount], const T (&from)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) assign(to[e], from[e]);
}
// The first kPart elements go to the end, and all others move up.
template <int kPart, typename T, int kCount>
__device__ inline void rotate(T (&x)[kCount]) {
  T first[kPart];
#pragma unroll
  for (int e = 0; e < kPart; ++e) assign(first[e], x[e]);
#pragma unroll
  for (int e = 0; e + kPart < kCount; ++e) assign(x[e], x[e + kPart]);
#pragma unroll
  for (int e = 0; e < kPart; ++e) assign(x[kCount - kPart + e], first[e]);
}
// In each turn the first elements of every array are worked on, a kTurns-th of them all; then the next ones take their
// place. After the last turn all are where they were.
template <int kTurns, typename... T, int... kCounts>
__device__ inline void next_turn(T (&... arrays)[kCounts]) {
  static_assert(((kCounts % kTurns == 0) && ...));
  if constexpr (kTurns > 1) (rotate<kCounts / kTurns>(arrays), ...);
}

// Query head h of sequence b.
struct Head {
  int h, b;
};

// To a relative 2^-22.
__device__ inline float tanh_of(float x) {
  const float square = x * x;
  float ratio = fmaf(square, kTanhRatio[4], kTanhRatio[3]);
  ratio = fmaf(square, ratio, kTanhRatio[2]);
  ratio = fmaf(square, ratio, kTanhRatio[1]);
  ratio = fmaf(square, ratio, kTanhRatio[0]);
  const float far = fmaf(-2.0f, ptx::reciprocal(ptx::exp2(2.0f * kLog2E * fabsf(x)) + 1.0f), 1.0f);
  return square < 0.25f ? x * ratio : copysignf(far, x);
}

// log2 of a positive normal number, to an absolute 2^-22 before its rounding: the instruction is as exact only near 1.
__device__ inline float log2_of(float x) {
  const int exponent = (__float_as_int(x) >> 23) - 127;
  const float mantissa = __int_as_float(__float_as_int(x) - (exponent << 23));
  return x - x == 0.0f ? static_cast<float>(exponent) + ptx::log2(mantissa) : x;
}

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) & 31; }

// Of ALiBi: how far a key lies behind a query.
__device__ inline int distance(const Params& p, int i, int j) { return i + p.seqlen_k - p.seqlen_q - j; }

// The bias of query i and key j, both inside the sequence.
__device__ inline float bias_of(const Params& p, const Head& head, int i, int j) {
  const long long at =
      head.b * p.bias_strides.batch + head.h * p.bias_strides.head + i * p.bias_strides.row + j * p.bias_strides.key;
  return BIAS == 2 ? static_cast<const float*>(p.bias)[at] : to_float(static_cast<const Element*>(p.bias)[at]);
}

// Whether block mask and mask show key j to query i.
__device__ inline bool visible_by_data(const Params& p, const Head& head, int i, int j) {
  bool seen = i < p.seqlen_q && j < p.seqlen_k;
  if constexpr (BLOCK_MASK) {
    const unsigned char* bits = p.block_mask + head.b * p.block_strides.batch + head.h * p.block_strides.head;
    seen = seen && bits[p.block_q.quotient(i) * p.block_strides.row + p.block_k.quotient(j) * p.block_strides.key] != 0;
  }
  if constexpr (MASK) {
    const unsigned char* bits = p.mask + head.b * p.mask_strides.batch + head.h * p.mask_strides.head;
    seen = seen && bits[i * p.mask_strides.row + j * p.mask_strides.key] != 0;
  }
  return seen;
}
// The same of the elements that a thread has of a row, or of a column: the first one is that of (i, j), the others are
// 1, 8, 9, 16, 17, ... further on. Bit n is element n. By a loop, few loads at a time: for more there are no registers.
template <int kCount, bool kAlongRow>
__device__ inline unsigned all_visible_by_data(const Params& p, const Head& head, int i, int j) {
  static_assert(kCount <= 32);
  unsigned seen = 0;
#pragma unroll 8
  for (int n = 0; n < kCount; ++n) {
    const int further = 8 * (n / 2) + n % 2;
    if (visible_by_data(p, head, kAlongRow ? i : i + further, kAlongRow ? j + further : j)) seen |= 1u << n;
  }
  return seen;
}

// What dropout leaves of a thread's elements: element 4 g + 2 r + c is of own + 8 r, where lanes 4 apart have
// neighbours, and of other + 8 g + c; `other` is even. A Philox call is for 2 x 2 neighbours, so that two such lanes
// need the same two of a group g: each makes one. By a loop, few calls at a time: for more there are no registers. The
// whole warp must be here.
template <int kGroups, bool kOwnIsQuery>
struct Kept {
  unsigned bits[DROPOUT ? (kGroups + 7) / 8 : 1];

  __device__ Kept(const Params& p, const Head& head, int own, int other) {
    if constexpr (!DROPOUT) return;
    const bool odd = (own & 1) != 0;
    const int mine = odd ? own + 8 : own;
#pragma unroll
    for (int first = 0; first < kGroups; first += 8) {
      unsigned& word = bits[first / 8] = 0;
#pragma unroll 2
      for (int g = 0; g < 8 && first + g < kGroups; ++g) {
        const int others = other + 8 * (first + g), i = kOwnIsQuery ? mine : others, j = kOwnIsQuery ? others : mine;
        const Philox random = Philox::make(static_cast<unsigned>(j >> 1), static_cast<unsigned>(i >> 1),
                                           static_cast<unsigned>(head.h), static_cast<unsigned>(head.b), p.seed);
        const auto kept = [&](int n) { return random.word[n] >= p.dropout_threshold ? 1u : 0u; };
        const unsigned of_even = kept(0) | kept(kOwnIsQuery ? 1 : 2) << 1;
        const unsigned of_odd = kept(kOwnIsQuery ? 2 : 1) | kept(3) << 1;
        const unsigned received = __shfl_xor_sync(~0u, odd ? of_even : of_odd, 4);
        word |= (odd ? received | of_odd << 2 : of_even | received << 2) << (4 * g);
      }
    }
  }
  __device__ bool operator()(int element) const { return (bits[element / 32] >> (element % 32) & 1) != 0; }
  __device__ float factor(const Params& p, int element) const {
    if constexpr (!DROPOUT) return 1.0f;
    return (*this)(element) ? p.dropout_kept : 0.0f;
  }
};

// What brings a product q . k to a score, or to the argument of a cap.
__device__ inline float scale_of(const Params& p) { return SOFTCAP ? p.scale_over_softcap : p.scale; }

__device__ inline Visibility visibility(const Params& p, const Head& head) {
  Visibility vis{{p.band_lo, p.band_hi}, p.seqlen_q, p.seqlen_k, {}};
  if constexpr (BLOCK_MASK) {
    vis.blocks = {p.block_mask + head.b * p.block_strides.batch + head.h * p.block_strides.head, p.block_strides.row,
                  p.block_strides.key, static_cast<int>(p.block_q.divisor), static_cast<int>(p.block_k.divisor)};
  }
  return vis;
}

}  // namespace headrace::cuda
