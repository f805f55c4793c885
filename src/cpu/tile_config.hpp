// The tile sizes of the CPU kernels: the one place where they are tuned.
#pragma once

#include <cstddef>

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

// Packed keys and values are padded to a multiple of this many rows and elements: a panel of every target.
inline constexpr Index packed_multiple = 64;

// Elements of a vector of bfloat16: rows that are multiplied in pairs take a multiple of this many.
inline constexpr Index packed_pairs = 32;

// Rows of a tile register of AMX: accumulators that it reads and writes have a multiple of this many.
inline constexpr Index amx_rows = 16;

// Distance of two rows of weights of bfloat16: one line more than the tile, for the sets of the L1 cache.
inline constexpr Index weight_stride = tile_k + packed_pairs;

// Keys and values are packed once, for all tasks, where that takes at most this much memory: half of a small L3 cache.
// Else every task packs the key tiles that it visits.
inline constexpr std::size_t shared_keys_bytes = std::size_t{17} << 20;

// Query tiles of a task: together they read a packed key tile, which then comes from the L2 cache for all but the
// first. As many as have a state (packed q, out) of at most this part of the L2 cache; or, where the task packs keys
// itself, of this many L2 caches: to stream the state costs less than to pack again. Fewer where a thread would get
// less than tasks_per_thread. No bit of a row depends on this.
inline constexpr Index task_state_part_of_l2 = 4;
inline constexpr Index task_state_l2 = 2;
inline constexpr Index max_tiles_per_task = 64;
inline constexpr Index tasks_per_thread = 8;

// Heads of a group are packed into one query tile where the sequence has at most this many rows.
inline constexpr Index pack_heads_below = 32;

// The keys are split where there are fewer query tiles than this, into parts of at least min_split_tiles
// key tiles. That depends on the shapes alone: results must not depend on the number of threads.
inline constexpr Index split_below_tiles = 32;
inline constexpr Index min_split_tiles = 4;

// Up to this many query rows of a key-value head, keys and values are streamed, not packed: a multiply-add for each row
// and vector that comes from memory hides behind the reading. Rows are asked for stream_ahead rows before they are
// used. All heads together make stream_parts parts of the keys, of at least stream_split_tiles key tiles each.
inline constexpr Index stream_rows = 8;
inline constexpr Index stream_ahead = 16;
inline constexpr Index stream_split_tiles = 2;
inline constexpr Index stream_parts = 64;

// Queries of the backward pass are packed once, for all tasks, where that takes at most this much memory, and there are
// more key tiles than this: rows of interleaved heads lie pages apart, which costs more than their bytes. Else every
// task packs each query tile. No bit depends on this. (float32, 2048 tokens, Zen 4: 1.03 times as fast with head_dim
// 64, 1.06 with 128.)
inline constexpr std::size_t shared_queries_bytes = std::size_t{48} << 20;
inline constexpr Index shared_queries_above = 2;

// The backward pass keeps seven tiles of keys alive; from this sum of head_dim and value_dim on it
// halves them to stay in a 1 MiB L2.
inline constexpr Index backward_wide_below = 192;

}  // namespace headrace::cpu
