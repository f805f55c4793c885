// The arguments of the Hopper forward kernels, beside tensor maps: read on host and device.
#pragma once

namespace headrace::cuda {

// Division of numbers below 2^31 by a divisor that the host knows: floor(n / d) = n * m / 2^(32 + shift) with
// m = ceil(2^(32 + shift) / d) and 2^shift >= d (Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994, section 4). m may need 33 bits: its highest one is left out.
struct Divisor {
  unsigned divisor, multiplier, shift;

  static constexpr Divisor of(unsigned d) {
    Divisor result{d, 0, 0};
    while ((1ULL << result.shift) < d) ++result.shift;
    result.multiplier = static_cast<unsigned>(((1ULL << 32) * ((1ULL << result.shift) - d)) / d + 1);
    return result;
  }
#ifdef __CUDACC_RTC__
  __device__ unsigned quotient(unsigned n) const { return (__umulhi(n, multiplier) + n) >> shift; }
#endif
};

// tanh(x) / x as a polynomial in x^2, to a relative 2^-26 for |x| <= 1/2 (minimax).
constexpr float kTanhRatio[5] = {0.99999999f, -0.33333069f, 0.13324779f, -0.052986076f, 0.017135007f};

struct HopperForwardParams {
  // Strides in elements, over (batch, row, head) or (batch, head, row); of bias and mask over (batch, head, row, key).
  struct Strides3 {
    long long s0, s1, s2;
  };
  struct Strides4 {
    long long batch, head, row, key;
  };

  void* out;  // 16-bit
  Strides3 out_strides;
  float* lse;  // null: not wanted
  Strides3 lse_strides;
  int store_by_tma;  // out has a tensor map

  const void* bias;  // float32 if bias_float32, else the type of q
  Strides4 bias_strides;
  const unsigned char* mask;
  Strides4 mask_strides;
  const unsigned char* block_mask;
  Strides4 block_strides;  // row and key count blocks
  Divisor block_q, block_k;
  const float* alibi_slopes;
  long long alibi_batch, alibi_head;
  const float* sinks;
  long long sinks_stride;

  int band_lo, band_hi;  // key j is visible to query i where lo <= j - i <= hi; within +-2^30
  int seqlen_q, seqlen_k, value_dim;
  Divisor heads_q, group;  // group: query heads that read one key-value head
  float scale;             // of the scores
  float softcap, scale_over_softcap;
  // In a raw product s with |s| < softcap_straight_below, s times a polynomial in s^2 is the capped score over ln(2).
  float softcap_straight_below, softcap_polynomial[5];
  unsigned long long seed;
  unsigned dropout_threshold;
  float dropout_kept;

  int query_tiles;      // of a head
  Divisor pieces;       // of work of a head: its tiles, or pairs of them
  unsigned blocks;      // of threads
  unsigned all_pieces;  // of all heads
  int redo_shift;       // tiles of a block that share one bit of the list of tiles to be done again, log2
};

}  // namespace headrace::cuda
