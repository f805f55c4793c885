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

// Query rows whose scores are alive at a time: a multiple of every target's register block. With 32 to 96 the
// score tile stays within reach of the L1 cache, and causal edges waste little.
inline constexpr Index tile_q = 48;

// Query tiles that share one packing of a key tile in the forward pass, at most. Packing rows that lie far
// apart costs cache and TLB misses, about as much as 50 rows of products. Fewer where their state (packed q,
// out) would take more than task_state_l2 times the L2 cache (2 is 1 to 4 % faster than 1 at d = 128: to stream
// the state costs less than to pack the keys again), or where a thread would get less than tasks_per_thread.
// No bit of a row depends on this.
inline constexpr Index task_state_l2 = 2;
inline constexpr Index max_tiles_per_task = 64;
inline constexpr Index tasks_per_thread = 4;

// Heads of a group are packed into one query tile where the sequence has at most this many rows.
inline constexpr Index pack_heads_below = 32;

// The keys are split where there are fewer query tiles than this, into parts of at least min_split_tiles
// key tiles. That depends on the shapes alone: results must not depend on the number of threads.
inline constexpr Index split_below_tiles = 32;
inline constexpr Index min_split_tiles = 4;

// The backward pass keeps seven tiles of keys alive; from this sum of head_dim and value_dim on it
// halves them to stay in a 1 MiB L2.
inline constexpr Index backward_wide_below = 192;

}  // namespace headrace::cpu
