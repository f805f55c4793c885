// Which tiles of queries a block of threads works on that has a tile of keys.
//
// Constants of the compilation, beside those of options.cuh: KEYS, QUERIES: of a tile.
#pragma once

#include "hopper_backward_params.hpp"
#include "options.cuh"

namespace headrace::cuda {

constexpr int kKeys = KEYS, kQueries = QUERIES;

__device__ inline Visibility band(const HopperBackwardParams& p) {
  return {{p.forward.band_lo, p.forward.band_hi}, p.forward.seqlen_q, p.forward.seqlen_k, {}};
}

// Key tile n of key-value head h of sequence b, and the query tiles [begin, end) that see its keys, visited round from
// `start` on, up or down; once for every query head of the group.
struct KeyTile {
  int n, h, b;
  int begin, end, start, step;

  __device__ void find_queries(const HopperBackwardParams& p) {
    const Range rows = band(p).rows_of_keys(keys(p));
    begin = rows.empty() ? 0 : rows.begin / kQueries;
    end = rows.empty() ? 0 : ceil_div(rows.end, kQueries);
  }
  __device__ Range keys(const HopperBackwardParams& p) const {
    return {n * kKeys, min_index(p.forward.seqlen_k, (n + 1) * kKeys)};
  }
};

__device__ inline Range rows_of(const HopperBackwardParams& p, int m) {
  return {m * kQueries, min_index(p.forward.seqlen_q, (m + 1) * kQueries)};
}

// Whether the block mask hides a key tile from query tile m of a head.
__device__ inline bool is_hidden(const HopperBackwardParams& p, const Head& head, int m, const KeyTile& tile) {
  return BLOCK_MASK && visibility(p.forward, head).classify(rows_of(p, m), tile.keys(p)) == TileKind::hidden;
}

// The steps of a key tile: query tile m of the query head number `head` of its group.
struct Steps {
  const HopperBackwardParams& p;
  const KeyTile& tile;
  int head = 0, m, left;

  // all: those too that the block mask hides.
  __device__ Steps(const HopperBackwardParams& params, const KeyTile& of, bool all = false)
      : p(params), tile(of), m(of.start), left(of.end - of.begin) {
    if (left <= 0) head = static_cast<int>(p.group.divisor);
    if (!all) skip_hidden();
  }
  __device__ bool any() const { return head < static_cast<int>(p.group.divisor); }
  __device__ void next() {
    m += tile.step;
    if (m == tile.end) m = tile.begin;
    if (m < tile.begin) m = tile.end - 1;
    if (--left == 0) {
      left = tile.end - tile.begin;
      m = tile.start;
      ++head;
    }
  }
  __device__ void advance() {
    next();
    skip_hidden();
  }
  __device__ Head query_head() const { return {tile.h * static_cast<int>(p.group.divisor) + head, tile.b}; }
  // The place of the tile among all query tiles.
  __device__ long long place() const {
    const Head q = query_head();
    return (static_cast<long long>(q.b) * p.forward.heads_q.divisor + q.h) * p.query_tiles.divisor + m;
  }
  __device__ bool hidden() const { return is_hidden(p, query_head(), m, tile); }

 private:
  __device__ void skip_hidden() {
    if constexpr (BLOCK_MASK) {
      while (any() && hidden()) next();
    }
  }
};

}  // namespace headrace::cuda
