// Which tiles a block of threads of a forward kernel works on, and which blocks of keys a tile visits.
//
// Constants of the compilation: WARPGROUPS, KEYS, PAIRED, BLOCK_MASK, as in hopper_forward.cuh.
#pragma once

#include "options.cuh"

namespace headrace::cuda {

constexpr int kRowsOfWarpgroup = 64, kRowsOfWarp = 16;
constexpr int kRows = WARPGROUPS * kRowsOfWarpgroup;  // queries of a tile
constexpr int kKeys = KEYS;                           // keys of a block

// A tile of queries: rows [m * kRows, ...) of query head h of sequence b; number n among the tiles of this block of
// threads.
struct Tile : Head {
  int m, n;
};

// The tiles of this block of threads. They are dealt out in the order of the heads, whose keys so stay in the L2 cache.
// Under a causal mask or a window their lengths differ, evenly from one end of a head to the other: then a tile and its
// counterpart at the other end are one piece of work, and all pieces have the same length, but for the middle tile of
// an odd number. So the blocks of threads change places in each round.
enum class Find { tile, nothing, end };
struct TileWalk {
  unsigned round = 0, place = blockIdx.x;
  bool second = false;  // of a pair
  int n = 0;

  __device__ Find next(const Params& p, Tile& tile) {
    const unsigned first = round * p.blocks, piece = first + place, sequence_head = p.pieces.quotient(piece);
    const int index = static_cast<int>(piece - sequence_head * p.pieces.divisor);
    const unsigned b = p.heads_q.quotient(sequence_head);
    tile.b = static_cast<int>(b);
    tile.h = static_cast<int>(sequence_head - b * p.heads_q.divisor);
    tile.m = PAIRED && !second ? p.query_tiles - 1 - index : index;
    tile.n = n++;
    const bool middle = PAIRED && second && 2 * index == p.query_tiles - 1;
    if (!PAIRED || second) {
      ++round;
      if (++place == p.blocks) place = 0;
    }
    second = PAIRED && !second;
    if (first >= p.all_pieces) {
      tile = {{0, 0}, 0, n};
      return Find::end;
    }
    return middle || piece >= p.all_pieces ? Find::nothing : Find::tile;
  }
};

// The blocks of keys that a tile visits, from the last to the first: the edges come first.
struct Blocks {
  Visibility vis;
  Range rows;
  int next, last;  // next < last: none are left

  __device__ Blocks(const Params& p, const Tile& tile)
      : vis(visibility(p, tile)),
        rows{static_cast<Index>(tile.m) * kRows, min_index(p.seqlen_q, static_cast<Index>(tile.m + 1) * kRows)} {
    const Range keys = vis.keys_of_rows(rows);
    next = keys.empty() ? -1 : static_cast<int>(static_cast<unsigned>(keys.end - 1) / kKeys);
    last = keys.empty() ? 0 : static_cast<int>(static_cast<unsigned>(keys.begin) / kKeys);
    skip_hidden();
  }
  __device__ bool any() const { return next >= last; }
  __device__ void advance() {
    --next;
    skip_hidden();
  }

  __device__ Range keys_of(int block) const {
    return {static_cast<Index>(block) * kKeys, min_index(vis.seqlen_k, static_cast<Index>(block + 1) * kKeys)};
  }

 private:
  __device__ void skip_hidden() {
    if constexpr (BLOCK_MASK) {
      while (any() && vis.classify(rows, keys_of(next)) == TileKind::hidden) --next;
    }
  }
};

// Blocks of keys [seen_begin, seen_end) are visible to one of a warpgroup's rows, [full_begin, full_end) to each; from
// settled_end on down each row sees a key of the block.
struct OwnBlocks {
  Range rows;
  int seen_begin, seen_end, full_begin, full_end, settled_end;

  __device__ OwnBlocks(const Visibility& vis, int row0) : rows{row0, min_index(vis.seqlen_q, row0 + kRowsOfWarpgroup)} {
    const Range some = vis.keys_of_rows(rows), all = vis.keys_of_all_rows(rows);
    const auto block_of = [](Index key) { return static_cast<int>(static_cast<unsigned>(key) / kKeys); };
    seen_begin = some.empty() ? 0 : block_of(some.begin);
    seen_end = some.empty() ? 0 : block_of(some.end + kKeys - 1);
    full_begin = block_of(all.begin + kKeys - 1);
    full_end = block_of(all.end);
    settled_end = block_of(all.end + kKeys - 1);
  }
  __device__ bool sees(int block) const { return block >= seen_begin && block < seen_end; }
};

// Whether the warpgroup's rows see no key of the next block.
__device__ inline bool hidden(const Blocks& blocks, const OwnBlocks& own) {
  if (!own.sees(blocks.next)) return true;
  return BLOCK_MASK && blocks.vis.classify(own.rows, blocks.keys_of(blocks.next)) == TileKind::hidden;
}
// Whether they do not see all of it.
__device__ inline bool edge(const Blocks& blocks, const OwnBlocks& own) {
  if (blocks.next < own.full_begin || blocks.next >= own.full_end) return true;
  return BLOCK_MASK && blocks.vis.classify(own.rows, blocks.keys_of(blocks.next)) == TileKind::edge;
}

}  // namespace headrace::cuda
