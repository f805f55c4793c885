// What the kernels of a SIMD target offer, and the plans that they read. No SIMD here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/tile_config.hpp"
#include "describe/problem.hpp"

namespace headrace::cpu {

// Bytes of each part of a thread's scratch memory, laid out one behind the other, 64-byte aligned.
struct Arena {
  std::size_t bytes = 0;
  std::size_t add(std::size_t size) {
    const std::size_t offset = bytes;
    bytes += (size + 63) / 64 * 64;
    return offset;
  }
};

// Query rows that are processed together: rows r = 0 ... heads * rows - 1 stand for query head
// head + r / rows and query row + r % rows. More than one head only where sequences are short.
struct QueryTile {
  Index head = 0, heads = 0;
  Index row = 0, rows = 0;
  [[nodiscard]] Index size() const { return heads * rows; }
  [[nodiscard]] Index head_of(Index r) const { return head + r / rows; }
  [[nodiscard]] Index row_of(Index r) const { return row + r % rows; }
};

// Query tiles [first, first + count) of (sequence, key-value head), against one part of their keys; where keys are
// streamed, the query tiles of `count` key-value heads from head_kv on, one each.
struct ForwardTask {
  std::int32_t sequence = 0, head_kv = 0;
  Index first = 0;
  std::int32_t count = 0;
  std::int32_t split = 0;
};

// Key tile `key_tile` of all key-value heads of a sequence.
struct PackTask {
  std::int32_t sequence = 0;
  Index key_tile = 0;
};

// Rows of a tile that are not finite. They are taken out of its packed rows; see HiddenRows.
struct BadRows {
  bool isolated = false;
  Index count = 0;
  std::uint16_t rows[tile_k] = {};
};

// What is known of a packed key tile, behind its keys and values.
struct PackedTile {
  bool seen = false;  // by a query; else it is not packed
  double k_magnitude = 0, v_magnitude = 0;
  double value_scale = 1;  // of the packed values
  BadRows bad;
};

// What is known of a packed query tile of the backward pass, behind its q and dout.
struct PackedQueries {
  double q_magnitude = 0, dout_magnitude = 0;
  BadRows q, dout;
};

// Where the packed key tiles of a sequence stand in the shared workspace, and the parts of each tile.
struct PackedSequence {
  std::size_t offset = 0, v = 0, tile = 0, bytes = 0;  // keys stand first; bytes: of all parts
  Index tiles = 0;                                     // of each key-value head
  [[nodiscard]] std::size_t at(Index head_kv, Index index) const {
    return offset + static_cast<std::size_t>(head_kv * tiles + index) * bytes;
  }
};

// What multiplies.
enum class ProductKind {
  vectors,       // vectors of the type that is summed in
  pairs,         // pairs of bfloat16, pairs-inl.h
  amx,           // tiles of bfloat16, amx-inl.h
  stream,        // vectors for few queries, keys and values unpacked, stream-inl.h
  stream_pairs,  // the same with pairs
};

struct ForwardPlan {
  const Problem* problem = nullptr;
  ProductKind products = ProductKind::vectors;
  Index tiles_per_task = 1;
  Index tile_rows = 0;  // that scratch memory has for a query tile
  Index splits = 1;
  std::vector<ForwardTask> tasks;  // tasks of the splits of one group of query tiles stand together
  std::vector<PackTask> pack_tasks;
  std::vector<PackedSequence> packed;  // [batch]
  bool shares_keys = false;            // all key tiles are packed before the tasks begin; else each task packs its own
  Index ld_q = 0, ld_out = 0;          // row lengths of packed q and of the output accumulator
  // Offsets in a thread's scratch memory.
  std::size_t q = 0, scores = 0, out = 0, max = 0, sum = 0, value_scale = 0, row = 0;
  std::size_t values = 0;   // sums of streamed values
  std::size_t weights = 0;  // rounded to bfloat16
  std::size_t keys = 0;     // a key tile, where it is not shared
  std::size_t scratch_bytes = 0;
  // In the shared workspace: packed key tiles; then the partial states of tasks, where splits > 1.
  std::size_t partials = 0, partial_bytes = 0, shared_bytes = 0;

  [[nodiscard]] bool streams() const { return products >= ProductKind::stream; }
  // The task whose turn is the nth: heads innermost, then the splits of one group of query tiles.
  [[nodiscard]] std::size_t task_in_turn(std::size_t n) const;
  [[nodiscard]] Index key_reuse() const;  // query tiles of a head that share one reading of a packed key tile
  [[nodiscard]] Index heads_per_tile(Index q_len) const;
  [[nodiscard]] Index query_tiles(Index q_len) const;
  [[nodiscard]] QueryTile query_tile(Index q_len, Index head_kv, Index index) const;
  [[nodiscard]] QueryTile tile_of(const ForwardTask& task, Index t) const;
};

// Keys [key_tile * tile_keys, ...) of (sequence, key-value head).
struct BackwardTask {
  std::int32_t sequence = 0, head_kv = 0;
  Index key_tile = 0;
};

// A tile of dbias: of (batch, head) of the bias, or of all that it broadcasts over.
struct BiasTask {
  std::int32_t batch = 0, head = 0;
  Index query_tile = 0, key_tile = 0;
};

struct BackwardPlan {
  const Problem* problem = nullptr;
  Index tile_keys = 0;
  // Tasks in the order in which they add to dq: a task waits only for earlier ones.
  std::vector<BackwardTask> tasks;
  std::vector<BiasTask> bias_tasks;
  std::vector<Index> row_offset;   // [batch]: rows of all heads before a sequence
  Index row_multiple = 1;          // each head has a multiple of this many rows
  std::vector<Index> tile_offset;  // [batch]: query tiles of all heads before a sequence
  bool dq_direct = false;          // dq itself is the accumulator
  ProductKind products = ProductKind::vectors;
  Index ld_q = 0, ld_v = 0;  // row lengths of accumulators of head_dim and value_dim
  // Offsets in a thread's scratch memory, and in the shared workspace. q, dout: of dbias alone.
  std::size_t q = 0, dout = 0, kt = 0, vt = 0, k_rows = 0, p = 0, ds = 0, dk = 0, dv = 0;
  std::size_t row = 0, dbias = 0, scratch_bytes = 0;
  std::size_t p_rounded = 0, ds_rounded = 0, ds_rows_rounded = 0;  // p and ds as products of bfloat16 read them
  std::size_t delta = 0, lse = 0, turns = 0, dq_accumulator = 0, queries = 0, shared_bytes = 0;
  bool shares_queries = false;  // all query tiles are packed before the tasks begin; else each task packs its own
  std::size_t own_tile = 0;     // in scratch memory, where they are not shared
  // Parts of a packed query tile, which begins with q as a left operand; and its bytes.
  std::size_t tile_dout = 0, tile_q_rows = 0, tile_dout_rows = 0, tile_facts = 0, tile_bytes = 0;

  // Rows that a head of a sequence has in statistics and accumulators, and the first of them.
  [[nodiscard]] Index head_rows(Index b) const {
    const Index rows = problem->sequences[static_cast<std::size_t>(b)].q_len;
    return ceil_div(rows, row_multiple) * row_multiple;
  }
  [[nodiscard]] Index head_row(Index b, Index h) const {
    return row_offset[static_cast<std::size_t>(b)] + h * head_rows(b);
  }

  // The number of a query tile of a head, among those of all sequences.
  [[nodiscard]] Index tile_number(Index b, Index h, Index query_tile) const {
    const Index tiles = ceil_div(problem->sequences[static_cast<std::size_t>(b)].q_len, tile_q);
    return tile_offset[static_cast<std::size_t>(b)] + h * tiles + query_tile;
  }
};

// One thread's view of a call.
struct Workspace {
  std::byte* shared = nullptr;
  std::byte* scratch = nullptr;
};

struct KernelTable {
  Index lanes_f32 = 0, lanes_f64 = 0;           // elements of a vector
  Index rows = 0;                               // rows of a register block
  ProductKind bfloat16 = ProductKind::vectors;  // what multiplies it

  // Packs a key tile of all heads for the tasks of the forward pass.
  void (*forward_pack)(const ForwardPlan&, const Buffers&, std::size_t task, Workspace) = nullptr;
  void (*forward)(const ForwardPlan&, const Buffers&, std::size_t task, Workspace) = nullptr;
  // Merges the splits whose first task is given, for one of its query tiles, and writes the rows.
  void (*merge_splits)(const ForwardPlan&, const Buffers&, std::size_t task, Index tile, Workspace) = nullptr;

  // Row statistics, packed queries and zeroed accumulators of query head h of sequence b.
  void (*backward_prepare)(const BackwardPlan&, const Buffers&, Index b, Index h, Workspace) = nullptr;
  void (*backward)(const BackwardPlan&, const Buffers&, std::size_t task, Workspace) = nullptr;
  // Rounds the accumulated dq of query head h of sequence b into the output.
  void (*backward_finish)(const BackwardPlan&, const Buffers&, Index b, Index h, Workspace) = nullptr;
  // dsinks of query head h, from the row statistics.
  void (*backward_sinks)(const BackwardPlan&, const Buffers&, Index h, Workspace) = nullptr;
  void (*backward_bias)(const BackwardPlan&, const Buffers&, std::size_t task, Workspace) = nullptr;
};

}  // namespace headrace::cpu
