// The tile sizes of the CPU kernels: the one place where they are tuned.
#pragma once

#include "tiling/tiling.hpp"

namespace headrace::cpu {

// Keys of a tile. Long enough that the exponentials' row state and the rescaling of the output are
// amortised, short enough that packed K and V of a tile stay in a 1 MiB L2 up to d = 128.
inline constexpr Index tile_k = 256;

// Distance of two rows of a score tile in elements: 16 more than the tile, so that eight rows do not
// fall into the same few sets of the L1 cache.
inline constexpr Index tile_stride = tile_k + 16;

// Query rows whose scores are alive at a time.
inline constexpr Index tile_q = 64;

// Query tiles that share one packing of a key tile in the forward pass, at most: packing and its cache
// misses cost about as much as 20 rows of products. Fewer where the tasks would become too few.
inline constexpr Index max_tiles_per_task = 16;
inline constexpr Index min_tiles_per_task = 2;
inline constexpr Index wanted_tasks = 32;

// Heads of a group are packed into one query tile where the sequence has at most this many rows.
inline constexpr Index pack_heads_below = 32;

// Where there are still fewer tasks, the keys are split into parts of at least this many key tiles. All
// this depends on the shapes alone: results must not depend on the number of threads.
inline constexpr Index min_split_tiles = 4;

// The backward pass keeps seven tiles of keys alive; from this sum of head_dim and value_dim on it
// halves them to stay in a 1 MiB L2.
inline constexpr Index backward_wide_below = 192;

}  // namespace headrace::cpu
