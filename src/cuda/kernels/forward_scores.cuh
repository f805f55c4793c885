// What the options of attention do to a block of scores that a warpgroup holds in registers.
//
// A thread has two rows, r = 0 and 1, 8 apart. Of every 8 columns it has two neighbours: element 4 g + 2 r + c is
// column 8 g + 2 (lane % 4) + c.
//
// Constants of the compilation: KEYS, SOFTCAP, ALIBI, BIAS, MASK, BLOCK_MASK, as in hopper_forward.cuh.
#pragma once

#include "forward_tiles.cuh"
#include "options.cuh"

namespace headrace::cuda {

constexpr int kElementTurns = element_turns(4);

// A thread's rows of a tile.
struct ThreadRows {
  Tile tile;
  int row[2];
  float slope;  // of ALiBi
};

// The bias of row r and a column of a block, where it is in memory; of what lies outside the sequence it does not
// matter.
struct BiasInMemory {
  const Params& p;
  const ThreadRows& rows;
  int block;

  __device__ float operator()(int r, int column) const {
    return bias_of(p, rows.tile, min(rows.row[r], p.seqlen_q - 1), min(block * kKeys + column, p.seqlen_k - 1));
  }
};

// Brings products to scores, in natural units. factor: scale_of() times what the products are in units of.
template <typename BiasOf>
__device__ inline void finish_scores(const Params& p, const ThreadRows& rows, int block, float (&s)[kKeys / 2],
                                     float factor, const BiasOf& bias_of) {
  HEADRACE_ROLLED
  for (int turn = 0; turn < kElementTurns; ++turn) {
    const int column0 = turn * (kKeys / kElementTurns) + 2 * (lane_of_thread() & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float behind = static_cast<float>(distance(p, rows.row[r], block * kKeys + column0));
#pragma unroll
      for (int n = 0; n < kKeys / kElementTurns / 4; ++n) {
        const int e = 4 * (n / 2) + 2 * r + n % 2, column = 8 * (n / 2) + n % 2;
        float x = s[e] * factor;
        if constexpr (SOFTCAP) x = p.softcap * tanh_of(x);
        if constexpr (BIAS) {
          const float bias = bias_of(r, column0 + column);
          x = bias == minus_infinity() ? bias : x + bias;
        }
        if constexpr (ALIBI) x -= rows.slope * fabsf(behind - static_cast<float>(column));
        s[e] = x;
      }
    }
    next_turn<kElementTurns>(s);
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
  constexpr int kOwnKeys = kKeys / 4;  // of a row
  static_assert(kOwnKeys <= 32);
  const int j0 = block * kKeys;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Columns [begin, end) of the block are in the band and the sequence.
    const Index low = max_index(0, min_index(p.seqlen_k, rows.row[r] + p.band_lo)) - j0;
    const Index high = max_index(0, min_index(p.seqlen_k, rows.row[r] + p.band_hi + 1)) - j0;
    const int begin = own_columns_below(low), end = own_columns_below(high);
    unsigned visible = first_bits(end) & ~first_bits(begin);
    if constexpr (MASK || BLOCK_MASK)
      visible &= all_visible_by_data<kOwnKeys, true>(p, rows.tile, rows.row[r], j0 + 2 * (lane_of_thread() & 3));
#pragma unroll
    for (int bit = 0; bit < kOwnKeys; ++bit) {
      if ((visible >> bit & 1) == 0) s[4 * (bit / 2) + 2 * r + bit % 2] = minus_infinity();
    }
  }
}

// Dropped elements become 0, the others `kept` times what they were.
__device__ inline void drop_scores(const Params& p, const ThreadRows& rows, int block, float (&s)[kKeys / 2],
                                   float kept) {
  const Kept<kKeys / 8, true> keeps(p, rows.tile, rows.row[0], block * kKeys + 2 * (lane_of_thread() & 3));
#pragma unroll
  for (int e = 0; e < kKeys / 2; ++e) s[e] *= keeps(e) ? kept : 0.0f;
}

}  // namespace headrace::cuda
