// How much of the score matrix the masks by position leave: what explain counts.
#pragma once

#include <cstdint>

#include "describe/problem.hpp"

namespace headrace {

// Summed over sequences and query heads. Doubles: the product of two lengths may exceed 64 bits; sums are exact below
// 2^53.
struct TileCounts {
  double total = 0, visited = 0, edge = 0;
  double pairs = 0;          // (query, key) pairs of all sequences, visible or not
  double visible_pairs = 0;  // that causal, window and block mask leave; mask and bias are data and not looked at
  bool exact = true;         // false: extrapolated from a sample of the rows of tiles, because the problem is huge, or
                             // the block mask was not there to be read and counts as all set
};

// Pairs (i, j) of the rectangle that the band leaves visible, without a loop.
double pairs_in_band(const Band& band, Range rows, Range keys);

// block_mask may be null. At most about `budget` tiles and blocks are looked at.
TileCounts count_tiles(const Problem& problem, const std::uint8_t* block_mask, std::int64_t tile_q, std::int64_t tile_k,
                       double budget = 1 << 20);

}  // namespace headrace
