// What the options of attention do to a block of scores that a warpgroup holds in registers.
//
// A thread has two rows, r = 0 and 1, 8 apart. Of every 8 columns it has two neighbours: element 4 g + 2 r + c is
// column 8 g + 2 (lane % 4) + c.
//
// Constants of the compilation: FLOAT16 (the type of a bias of the type of q), KEYS, SOFTCAP, ALIBI, BIAS, MASK,
// BLOCK_MASK, as in hopper_forward.cuh.
#pragma once

#include "describe/dropout.hpp"
#include "forward_tiles.cuh"
#include "ptx/math.cuh"

namespace headrace::cuda {

using Element = unsigned short;  // bfloat16 or float16

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ inline float minus_infinity() { return __int_as_float(static_cast<int>(0xFF800000u)); }
// An infinity that a finite input brought about might end as a p of 0, and pass for a result.
__device__ inline float nan_if_infinite(float x) { return fmaf(x, 0.0f, x); }

__device__ inline float to_float(Element bits) {
  float x;
#if FLOAT16
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
#else
  x = __uint_as_float(static_cast<unsigned>(bits) << 16);
#endif
  return x;
}

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

// A thread's rows of a tile.
struct ThreadRows {
  Tile tile;
  int row[2];
  float slope;  // of ALiBi
};

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) & 31; }

// Of ALiBi: how far a key lies behind a query.
__device__ inline int distance(const Params& p, int i, int j) { return i + p.seqlen_k - p.seqlen_q - j; }

// The bias of query i and key j, both inside the sequence.
__device__ inline float bias_of(const Params& p, const Tile& tile, int i, int j) {
  const long long at =
      tile.b * p.bias_strides.batch + tile.h * p.bias_strides.head + i * p.bias_strides.row + j * p.bias_strides.key;
  return BIAS == 2 ? static_cast<const float*>(p.bias)[at] : to_float(static_cast<const Element*>(p.bias)[at]);
}

// Whether block mask and mask show key j to query i.
__device__ inline bool visible_by_data(const Params& p, const Tile& tile, int i, int j) {
  if (i >= p.seqlen_q || j >= p.seqlen_k) return false;
  if constexpr (BLOCK_MASK) {
    const unsigned char* bits = p.block_mask + tile.b * p.block_strides.batch + tile.h * p.block_strides.head;
    if (bits[p.block_q.quotient(i) * p.block_strides.row + p.block_k.quotient(j) * p.block_strides.key] == 0)
      return false;
  }
  if constexpr (MASK) {
    return p.mask[tile.b * p.mask_strides.batch + tile.h * p.mask_strides.head + i * p.mask_strides.row +
                  j * p.mask_strides.key] != 0;
  }
  return true;
}

// What brings a product q . k to a score, or to the argument of a cap.
__device__ inline float scale_of(const Params& p) { return SOFTCAP ? p.scale_over_softcap : p.scale; }

// Brings products to scores, in natural units. factor: scale_of() times what the products are in units of.
__device__ inline void finish_scores(const Params& p, const ThreadRows& rows, int block, float (&s)[kKeys / 2],
                                     float factor) {
  const int j0 = block * kKeys + 2 * (lane_of_thread() & 3);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = rows.row[r];
    const float behind = static_cast<float>(distance(p, i, j0));
#pragma unroll
    for (int n = 0; n < kKeys / 4; ++n) {
      const int e = 4 * (n / 2) + 2 * r + n % 2, column = 8 * (n / 2) + n % 2;
      float x = s[e] * factor;
      if constexpr (SOFTCAP) x = p.softcap * tanh_of(x);
      if constexpr (BIAS) {
        const float bias = bias_of(p, rows.tile, min(i, p.seqlen_q - 1), min(j0 + column, p.seqlen_k - 1));
        x = bias == minus_infinity() ? bias : x + bias;
      }
      if constexpr (ALIBI) x -= rows.slope * fabsf(behind - static_cast<float>(column));
      s[e] = x;
    }
  }
}

// Of the thread's columns of a block, how many lie before a column.
__device__ inline int own_columns_below(int column) {
  const int clamped = min(kKeys, max(0, column));
  return clamped / 8 * 2 + min(2, max(0, clamped % 8 - 2 * (lane_of_thread() & 3)));
}
__device__ inline unsigned first_bits(int count) { return count >= 32 ? ~0u : (1u << max(0, count)) - 1; }

// What is not visible becomes -inf.
__device__ inline void mask_scores(const Params& p, const ThreadRows& rows, int block, float (&s)[kKeys / 2]) {
  const int j0 = block * kKeys, column0 = 2 * (lane_of_thread() & 3);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Columns [begin, end) of the block are in the band and the sequence.
    const Index low = max_index(0, min_index(p.seqlen_k, rows.row[r] + p.band_lo)) - j0;
    const Index high = max_index(0, min_index(p.seqlen_k, rows.row[r] + p.band_hi + 1)) - j0;
    const int begin = own_columns_below(low), end = own_columns_below(high);
#pragma unroll
    for (int word = 0; word < ceil_div(kKeys, 128); ++word) {
      const unsigned visible = first_bits(end - 32 * word) & ~first_bits(begin - 32 * word);
#pragma unroll
      for (int bit = 0; bit < 32 && 32 * word + bit < kKeys / 4; ++bit) {
        const int g = (32 * word + bit) / 2, c = bit & 1;
        bool seen = (visible >> bit & 1) != 0;
        if constexpr (MASK || BLOCK_MASK)
          seen = seen && visible_by_data(p, rows.tile, rows.row[r], j0 + 8 * g + column0 + c);
        if (!seen) s[4 * g + 2 * r + c] = minus_infinity();
      }
    }
  }
}

// Dropped elements become 0, the others `kept` times what they were.
__device__ inline void drop_scores(const Params& p, const ThreadRows& rows, int block, float (&s)[kKeys / 2],
                                   float kept) {
  const bool odd = (rows.row[0] & 1) != 0;
#pragma unroll
  for (int e = 0; e < kKeys / 2; e += 2) {
    const int i = rows.row[(e >> 1) & 1], j = block * kKeys + 8 * (e / 4) + 2 * (lane_of_thread() & 3);
    const Philox random = Philox::make(static_cast<unsigned>(j >> 1), static_cast<unsigned>(i >> 1),
                                       static_cast<unsigned>(rows.tile.h), static_cast<unsigned>(rows.tile.b), p.seed);
    s[e] *= (odd ? random.word[2] : random.word[0]) >= p.dropout_threshold ? kept : 0.0f;
    s[e + 1] *= (odd ? random.word[3] : random.word[1]) >= p.dropout_threshold ? kept : 0.0f;
  }
}

}  // namespace headrace::cuda
