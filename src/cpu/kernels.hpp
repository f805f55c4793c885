// What the kernels of a SIMD target offer, and the plans that they read. No SIMD here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

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

// Query tiles [first, first + count) of (sequence, key-value head), against one part of their keys.
struct ForwardTask {
  std::int32_t sequence = 0, head_kv = 0;
  Index first = 0;
  std::int32_t count = 0;
  std::int32_t split = 0;
};

struct ForwardPlan {
  const Problem* problem = nullptr;
  Index tiles_per_task = 1;
  Index splits = 1;
  std::vector<ForwardTask> tasks;  // tasks of the splits of one group of query tiles stand together
  bool amx = false;                // products on AMX tiles
  Index ld_q = 0, ld_out = 0;      // row lengths of packed q and of the output accumulator
  // Offsets in a thread's scratch memory; of packed keys and values there are two tiles, a current and a next one.
  std::size_t q = 0, kt[2] = {}, v[2] = {}, scores = 0, out = 0, max = 0, sum = 0, value_scale = 0, row = 0;
  std::size_t weights = 0;        // with AMX: rounded to bfloat16
  std::size_t scratch_bytes = 0;  // a thread
  std::size_t partial_bytes = 0;  // a task, where splits > 1

  [[nodiscard]] Index key_reuse() const;  // query tiles of one head that share one packing of a key tile
  [[nodiscard]] Index heads_per_tile(Index q_len) const;
  [[nodiscard]] Index query_tiles(Index q_len) const;
  [[nodiscard]] QueryTile query_tile(Index q_len, Index head_kv, Index index) const;
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
  std::vector<Index> turn_offset;  // [batch]: query tiles of all heads before a sequence
  bool dq_direct = false;          // dq itself is the accumulator
  Index ld_q = 0, ld_v = 0;        // row lengths of accumulators of head_dim and value_dim
  // Offsets in a thread's scratch memory, and in the shared workspace.
  std::size_t q = 0, dout = 0, q_rows = 0, dout_rows = 0, kt = 0, vt = 0, k_rows = 0, p = 0, ds = 0, dk = 0, dv = 0;
  std::size_t row = 0, dbias = 0, scratch_bytes = 0;
  std::size_t delta = 0, lse = 0, turns = 0, dq_accumulator = 0, shared_bytes = 0;
};

// One thread's view of a call.
struct Workspace {
  std::byte* shared = nullptr;
  std::byte* scratch = nullptr;
};

struct KernelTable {
  Index lanes_f32 = 0, lanes_f64 = 0;  // elements of a vector
  Index rows = 0;                      // rows of a register block
  bool amx = false;                    // the forward pass takes AMX tiles for bfloat16

  void (*forward)(const ForwardPlan&, const Buffers&, std::size_t task, Workspace) = nullptr;
  // Merges the splits whose first task is given, and writes the rows.
  void (*merge_splits)(const ForwardPlan&, const Buffers&, std::size_t task, Workspace) = nullptr;

  // Row statistics and zeroed accumulators of query head h of sequence b.
  void (*backward_prepare)(const BackwardPlan&, const Buffers&, Index b, Index h, Workspace) = nullptr;
  void (*backward)(const BackwardPlan&, const Buffers&, std::size_t task, Workspace) = nullptr;
  // Rounds the accumulated dq of query head h of sequence b into the output.
  void (*backward_finish)(const BackwardPlan&, const Buffers&, Index b, Index h, Workspace) = nullptr;
  // dsinks of query head h, from the row statistics.
  void (*backward_sinks)(const BackwardPlan&, const Buffers&, Index h, Workspace) = nullptr;
  void (*backward_bias)(const BackwardPlan&, const Buffers&, std::size_t task, Workspace) = nullptr;
};

}  // namespace headrace::cpu
