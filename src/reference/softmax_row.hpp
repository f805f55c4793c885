// The probabilities of one row and, backward, the gradients of its scores.
#pragma once

#include <cstdint>

#include "headrace/streaming.hpp"
#include "reference/scores.hpp"
#include "reference/workspace.hpp"

namespace headrace::reference {

struct SoftmaxRow {
  std::int64_t visible = 0;  // how many keys the row sees
  double lse = 0.0;
  double p_sink = 0.0;  // the probability that goes to the sink
};

// From row.q fills row.keys, row.q_dot_k and row.p. k: [k_len, head_dim]. Keys that a mask hides are
// left out altogether, so that a NaN in them cannot matter.
inline SoftmaxRow softmax_row(const Scores& scores, std::int64_t i, std::int64_t k_len, std::int64_t head_dim,
                              const double* k, const RowScratch& row) {
  SoftmaxRow result;
  for (std::int64_t j = 0; j < k_len; ++j) {
    if (!scores.visible(i, j)) continue;
    const std::int64_t n = result.visible++;
    row.keys[n] = j;
    row.q_dot_k[n] = dot(row.q, k + j * head_dim, head_dim);
    row.p[n] = scores.score(i, j, row.q_dot_k[n]);
  }
  SoftmaxState<double> state;
  state.update(row.p, result.visible);
  state.update(scores.sink());
  const auto [lse, scale] = state.finalize();
  for (std::int64_t n = 0; n < result.visible; ++n) row.p[n] = state.weight(row.p[n]) * scale;
  result.p_sink = state.weight(scores.sink()) * scale;
  result.lse = lse;
  return result;
}

// After softmax_row, from row.dout and the gradient dlse that reaches the lse of the row fills row.dp
// and row.ds; returns D = dout . out - dlse. v: [k_len, value_dim].
//
// The gradients wanted are those of the exact inputs. So p comes from the exact lse rather than from the
// given one, which a kernel has rounded to float32, and dout . out is summed over the exact
// out = sum_j p_j v_j: sum_j p_j dp_j.
inline double softmax_row_backward(const Scores& scores, std::int64_t i, const SoftmaxRow& softmax,
                                   std::int64_t value_dim, const double* v, double dlse, const RowScratch& row) {
  double d = -dlse;
  for (std::int64_t n = 0; n < softmax.visible; ++n) {
    const std::int64_t j = row.keys[n];
    row.dp[n] = scores.dropout_factor(i, j) * dot(row.dout, v + j * value_dim, value_dim);
    d += row.p[n] * row.dp[n];
  }
  for (std::int64_t n = 0; n < softmax.visible; ++n) row.ds[n] = row.p[n] * (row.dp[n] - d);
  return d;
}

}  // namespace headrace::reference
