#include <omp.h>

#include <algorithm>
#include <limits>

#include "reference/passes.hpp"
#include "reference/softmax_row.hpp"

namespace headrace::reference {
namespace {

void forward_row(const Problem& p, const Buffers& buffers, const Workspace& workspace, double* base, std::int64_t b,
                 std::int64_t h, std::int64_t i) {
  const Sequence& s = p.sequences[static_cast<std::size_t>(b)];
  const RowScratch row = workspace.row(base, omp_get_thread_num());
  const std::int64_t batch = p.ragged ? 0 : b, token = s.q_begin + i, g = h / p.group();
  const Scores scores(p, buffers, b, h);

  load_elements(buffers.q, p.dtype, p.q.at(batch, token, h), p.head_dim, row.q);
  const SoftmaxRow softmax = softmax_row(scores, i, s.k_len, p.head_dim, workspace.k(base, b, g), row);

  const double* v = workspace.v(base, b, g);
  std::fill_n(row.out, p.value_dim, 0.0);
  for (std::int64_t n = 0; n < softmax.visible; ++n) {
    const std::int64_t j = row.keys[n];
    add_scaled(row.p[n] * scores.dropout_factor(i, j), v + j * p.value_dim, p.value_dim, row.out);
  }
  store_elements(buffers.out, p.dtype, p.out.at(batch, token, h), p.value_dim, row.out);
  if (p.has_lse) store_element(buffers.lse, p.lse_dtype, p.lse.at(batch, h, token), softmax.lse);
}

}  // namespace

void widen_keys_and_values(const Problem& p, const Buffers& buffers, const Workspace& workspace, double* base,
                           int threads) {
#pragma omp parallel for num_threads(threads) collapse(2)
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t g = 0; g < p.heads_kv; ++g) {
      const Sequence& s = p.sequences[static_cast<std::size_t>(b)];
      const std::int64_t batch = p.ragged ? 0 : b;
      double *k = workspace.k(base, b, g), *v = workspace.v(base, b, g);
      for (std::int64_t j = 0; j < s.k_len; ++j) {
        load_elements(buffers.k, p.dtype, p.k.at(batch, s.k_begin + j, g), p.head_dim, k + j * p.head_dim);
        load_elements(buffers.v, p.dtype, p.v.at(batch, s.k_begin + j, g), p.value_dim, v + j * p.value_dim);
      }
    }
  }
}

void forward(const Problem& p, const Buffers& buffers, const Workspace& workspace, double* base, int threads) {
  widen_keys_and_values(p, buffers, workspace, base, threads);
#pragma omp parallel for num_threads(threads) collapse(3) schedule(dynamic, 16)
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      for (std::int64_t i = 0; i < p.seqlen_q; ++i) {
        if (i < p.sequences[static_cast<std::size_t>(b)].q_len) forward_row(p, buffers, workspace, base, b, h, i);
      }
    }
  }
  for (const RowRange& unused : p.unused_q) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      for (std::int64_t token = unused.begin; token < unused.end; ++token) {
        fill_elements(buffers.out, p.dtype, p.out.at(unused.batch, token, h), p.value_dim, 0.0);
        if (p.has_lse)
          store_element(buffers.lse, p.lse_dtype, p.lse.at(unused.batch, h, token),
                        -std::numeric_limits<double>::infinity());
      }
    }
  }
}

}  // namespace headrace::reference
