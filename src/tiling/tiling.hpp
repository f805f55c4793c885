// Which tiles of the score matrix a mask leaves visible, and which of those need an element mask.
// The one source of this knowledge for every backend and for explain. Self-contained: it compiles as
// host code and, with HEADRACE_HOST_DEVICE defined, as device code under NVRTC.
#pragma once

#ifndef __CUDACC_RTC__
#include <cstdint>
#endif

#ifndef HEADRACE_HOST_DEVICE
#define HEADRACE_HOST_DEVICE
#endif

namespace headrace {

// Before a loop that is not to be unrolled.
#ifndef HEADRACE_ROLLED
#define HEADRACE_ROLLED
#endif

#ifndef HEADRACE_INDEX
#define HEADRACE_INDEX long long
#endif
// 64 bits, but for kernels that define HEADRACE_INDEX as int: their lengths, and the finite bounds of their bands, are
// below 2^30.
using Index = HEADRACE_INDEX;

HEADRACE_HOST_DEVICE constexpr Index min_index(Index a, Index b) { return a < b ? a : b; }
HEADRACE_HOST_DEVICE constexpr Index max_index(Index a, Index b) { return a < b ? b : a; }
HEADRACE_HOST_DEVICE constexpr Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }

// A half-open range of keys or rows.
struct Range {
  Index begin = 0, end = 0;
  HEADRACE_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  HEADRACE_HOST_DEVICE constexpr Index size() const { return empty() ? 0 : end - begin; }
};

// Causal and window masks of one sequence are one diagonal band: key j is visible to query i where
// lo <= j - i <= hi.
struct Band {
  // Lengths are below 2^40 (validated), so bounds beyond +-2^60 hide or show everything and i + lo
  // cannot overflow.
  static constexpr Index unbounded = Index{1} << (sizeof(Index) == 8 ? 60 : 30);

  Index lo = -unbounded, hi = unbounded;

  // window_left / window_right: INT64_MAX means no bound; any other value, negative ones too, is exact.
  HEADRACE_HOST_DEVICE static constexpr Band make(Index seqlen_q, Index seqlen_k, bool causal, bool top_left,
                                                  Index window_left, Index window_right) {
    const Index shift = top_left ? 0 : seqlen_k - seqlen_q;
    Band band;
    if (window_left < unbounded) band.lo = shift - max_index(window_left, -unbounded);
    if (window_right < unbounded) band.hi = shift + max_index(window_right, -unbounded);
    if (causal) band.hi = min_index(band.hi, shift);
    return band;
  }

  HEADRACE_HOST_DEVICE constexpr bool visible(Index i, Index j) const { return j - i >= lo && j - i <= hi; }
  HEADRACE_HOST_DEVICE constexpr bool everything() const { return lo == -unbounded && hi == unbounded; }
};

// A block mask of one (sequence, head): bits[(i / block_q) * stride_q + (j / block_k) * stride_k] != 0
// makes the block visible. bits == nullptr: every block is.
struct BlockMask {
  const unsigned char* bits = nullptr;
  long long stride_q = 0, stride_k = 0;
  Index block_q = 1, block_k = 1;

  HEADRACE_HOST_DEVICE constexpr bool visible(Index i, Index j) const {
    return bits == nullptr || bits[(i / block_q) * stride_q + (j / block_k) * stride_k] != 0;
  }
};

enum class TileKind {
  hidden,  // no element is visible: never read
  full,    // every element is visible
  edge     // an element mask decides
};

// Everything that decides visibility by position in one (sequence, head). Boolean masks and biases of
// -inf are data: they never make a tile hidden or full here.
struct Visibility {
  Band band;
  Index seqlen_q = 0, seqlen_k = 0;
  BlockMask blocks;

  HEADRACE_HOST_DEVICE constexpr bool visible(Index i, Index j) const {
    return band.visible(i, j) && blocks.visible(i, j);
  }

  // The keys that the band shows to at least one of the rows: an interval, since the band is one.
  HEADRACE_HOST_DEVICE constexpr Range keys_of_rows(Range rows) const {
    if (rows.empty() || band.lo > band.hi) return {0, 0};
    return {max_index(0, min_index(seqlen_k, rows.begin + band.lo)),
            max_index(0, min_index(seqlen_k, rows.end - 1 + band.hi + 1))};
  }

  // The keys that the band shows to every one of the rows.
  HEADRACE_HOST_DEVICE constexpr Range keys_of_all_rows(Range rows) const {
    if (rows.empty() || band.lo > band.hi) return {0, 0};
    return {max_index(0, min_index(seqlen_k, rows.end - 1 + band.lo)),
            max_index(0, min_index(seqlen_k, rows.begin + band.hi + 1))};
  }

  // The rows to which the band shows at least one of the keys.
  HEADRACE_HOST_DEVICE constexpr Range rows_of_keys(Range keys) const {
    if (keys.empty() || band.lo > band.hi) return {0, 0};
    return {max_index(0, min_index(seqlen_q, keys.begin - band.hi)),
            max_index(0, min_index(seqlen_q, keys.end - 1 - band.lo + 1))};
  }

  // rows and keys must be non-empty and inside the sequence.
  HEADRACE_HOST_DEVICE constexpr TileKind classify(Range rows, Range keys) const {
    const Index nearest = keys.begin - (rows.end - 1);  // the smallest and largest j - i of the tile
    const Index farthest = keys.end - 1 - rows.begin;
    if (band.lo > band.hi || farthest < band.lo || nearest > band.hi) return TileKind::hidden;
    const bool inside_band = nearest >= band.lo && farthest <= band.hi;
    if (blocks.bits == nullptr) return inside_band ? TileKind::full : TileKind::edge;
    bool any = false, all = true;
    HEADRACE_ROLLED
    for (Index bi = rows.begin / blocks.block_q; bi <= (rows.end - 1) / blocks.block_q; ++bi) {
      HEADRACE_ROLLED
      for (Index bj = keys.begin / blocks.block_k; bj <= (keys.end - 1) / blocks.block_k; ++bj) {
        const bool set = blocks.bits[bi * blocks.stride_q + bj * blocks.stride_k] != 0;
        any = any || set;
        all = all && set;
      }
    }
    if (!any) return TileKind::hidden;
    return all && inside_band ? TileKind::full : TileKind::edge;
  }
};

}  // namespace headrace
