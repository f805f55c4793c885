// Work and traffic of a call as formulas: what explain compares. Bytes are those that cross between slow memory and the
// compute units if a task's working set stays in fast memory.
//
// Standard attention writes the score matrix S and the probabilities P and reads them back: Theta(N d + N^2) accesses.
// Streaming attention reads K and V once for every group of query tiles that sees them: Theta(N^2 d^2 / M) with fast
// memory of size M (FlashAttention, Dao et al. 2022, Theorem 2; its Algorithms 0 to 4 are what is counted here).
#pragma once

#include <algorithm>
#include <cstdint>

#include "describe/problem.hpp"
#include "describe/tensor_view.hpp"
#include "plan/tile_counts.hpp"

namespace headrace {

struct IoModel {
  double flops = 0;
  double bytes_streaming = 0, bytes_standard = 0;

  [[nodiscard]] double intensity() const { return bytes_streaming > 0 ? flops / bytes_streaming : 0; }
};

// key_reuse: query tiles of the forward pass that share one reading of a key tile.
inline IoModel io_model(const Problem& p, const TileCounts& counts, std::int64_t tile_q, std::int64_t tile_k,
                        std::int64_t key_reuse) {
  const double d = static_cast<double>(p.head_dim), dv = static_cast<double>(p.value_dim);
  const double element = static_cast<double>(dtype_size(p.dtype));
  const double accumulator = p.dtype == HR_FLOAT64 ? 8 : 4;  // of scores, statistics and gradients in progress
  double tokens_q = 0, tokens_k = 0;
  for (const Sequence& s : p.sequences) {
    tokens_q += static_cast<double>(s.q_len);
    tokens_k += static_cast<double>(s.k_len);
  }
  const double q_rows = tokens_q * static_cast<double>(p.heads_q);
  const double k_rows = tokens_k * static_cast<double>(p.heads_kv);
  // Of a tile at the end of a sequence only what exists is moved.
  const double rows_of_tile = static_cast<double>(min_index(tile_q, max_index(p.seqlen_q, 1)));
  const double keys_of_tile = static_cast<double>(min_index(tile_k, max_index(p.seqlen_k, 1)));
  const double pair = (p.has_bias ? static_cast<double>(dtype_size(p.bias_dtype)) : 0) + (p.has_mask ? 1 : 0);
  const double visited_pairs = counts.visited * rows_of_tile * keys_of_tile;

  IoModel model;
  if (p.pass == Pass::forward) {
    model.flops = counts.visible_pairs * 2 * (d + dv);  // Q K^T and P V
    const double rows = q_rows * ((d + dv) * element + (p.has_lse ? accumulator : 0));
    model.bytes_streaming = rows + counts.visited / static_cast<double>(key_reuse) * keys_of_tile * (d + dv) * element +
                            std::min(visited_pairs, counts.pairs) * pair;
    // S written and read, P written and read.
    model.bytes_standard = rows + k_rows * (d + dv) * element + counts.pairs * (4 * accumulator + pair);
  } else {
    model.flops = counts.visible_pairs * (6 * d + 4 * dv);  // Q K^T, dS K, dS^T Q; dO V^T, P^T dO
    // Read: q, out, dout, lse, k, v; written: dq, dk, dv.
    const double vectors = q_rows * ((2 * d + 2 * dv) * element + accumulator) + k_rows * 2 * (d + dv) * element;
    // A tile of keys stays; every visited tile reads q and dout and adds to dq.
    model.bytes_streaming = vectors + counts.visited * rows_of_tile * ((d + dv) * element + 2 * d * accumulator) +
                            std::min(visited_pairs, counts.pairs) * pair;
    // P read twice, dP written and read, dS written and read twice.
    model.bytes_standard = vectors + counts.pairs * (7 * accumulator + pair);
  }
  return model;
}

}  // namespace headrace
