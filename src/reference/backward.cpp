#include <omp.h>

#include <algorithm>
#include <limits>

#include "reference/passes.hpp"
#include "reference/softmax_row.hpp"

namespace headrace::reference {
namespace {

class Backward {
 public:
  Backward(const Problem& problem, const Buffers& buffers, const Workspace& workspace, double* base)
      : p(problem), buffers_(buffers), workspace_(workspace), base_(base) {}

  // dq of every row that reads key-value head g of sequence b, the dk and dv of that head, and what
  // its query heads' sinks get.
  void head(std::int64_t b, std::int64_t g) const {
    const Sequence& s = sequence(b);
    double *dk = workspace_.dk(base_, b, g), *dv = workspace_.dv(base_, b, g);
    std::fill_n(dk, s.k_len * p.head_dim, 0.0);
    std::fill_n(dv, s.k_len * p.value_dim, 0.0);
    for (std::int64_t h = g * p.group(); h < (g + 1) * p.group(); ++h) {
      double dsink = 0.0;
      for (std::int64_t i = 0; i < s.q_len; ++i) dsink += row(b, h, i, dk, dv);
      workspace_.dsink(base_, b, h) = dsink;
    }
    const std::int64_t batch = p.ragged ? 0 : b;
    for (std::int64_t j = 0; j < s.k_len; ++j) {
      store_elements(buffers_.dk, p.dtype, p.dk.at(batch, s.k_begin + j, g), p.head_dim, dk + j * p.head_dim);
      store_elements(buffers_.dv, p.dtype, p.dv.at(batch, s.k_begin + j, g), p.value_dim, dv + j * p.value_dim);
    }
  }

  // Row r of batch entry bb and head hh of dbias: summed over every (b, h, i, j) that read it.
  void bias_row(std::int64_t bb, std::int64_t hh, std::int64_t r) const {
    const std::int64_t* shape = p.bias_shape;
    const RowScratch scratch = workspace_.row(base_, omp_get_thread_num());
    const bool every_b = shape[0] == 1, every_h = shape[1] == 1, every_i = shape[2] == 1, every_j = shape[3] == 1;
    std::fill_n(scratch.dbias, every_j ? 1 : p.seqlen_k, 0.0);
    for (std::int64_t b = every_b ? 0 : bb; b < (every_b ? p.batch : bb + 1); ++b) {
      for (std::int64_t h = every_h ? 0 : hh; h < (every_h ? p.heads_q : hh + 1); ++h) {
        const std::int64_t q_len = sequence(b).q_len;
        for (std::int64_t i = every_i ? 0 : r; i < std::min(q_len, every_i ? q_len : r + 1); ++i) {
          const RowGradient gradient = score_gradients(b, h, i, scratch);
          for (std::int64_t n = 0; n < gradient.softmax.visible; ++n)
            scratch.dbias[every_j ? 0 : scratch.keys[n]] += scratch.ds[n];
        }
      }
    }
    // A ragged bias may be wider than the longest sequence.
    for (std::int64_t j = 0; j < shape[3]; ++j)
      store_element(buffers_.dbias, p.bias_dtype, p.dbias.at(bb, hh, r, j),
                    every_j || j < p.seqlen_k ? scratch.dbias[j] : 0.0);
  }

 private:
  struct RowGradient {
    SoftmaxRow softmax;
    double d;  // dout . out - dlse
  };

  [[nodiscard]] const Sequence& sequence(std::int64_t b) const { return p.sequences[static_cast<std::size_t>(b)]; }

  RowGradient score_gradients(std::int64_t b, std::int64_t h, std::int64_t i, const RowScratch& scratch) const {
    const Sequence& s = sequence(b);
    const std::int64_t batch = p.ragged ? 0 : b, token = s.q_begin + i, g = h / p.group();
    const Scores scores(p, buffers_, b, h);
    load_elements(buffers_.q, p.dtype, p.q.at(batch, token, h), p.head_dim, scratch.q);
    load_elements(buffers_.dout, p.dtype, p.dout.at(batch, token, h), p.value_dim, scratch.dout);
    const SoftmaxRow softmax = softmax_row(scores, i, s.k_len, p.head_dim, workspace_.k(base_, b, g), scratch);

    // Where lse is -inf it does not depend on anything.
    double dlse = 0.0;
    if (p.has_dlse && softmax.lse != -std::numeric_limits<double>::infinity())
      dlse = load_element(buffers_.dlse, p.dlse_dtype, p.dlse.at(batch, h, token));
    const double d = softmax_row_backward(scores, i, softmax, p.value_dim, workspace_.v(base_, b, g), dlse, scratch);
    return {softmax, d};
  }

  // Stores dq of the row, adds to dk and dv, and returns what the row gives to the sink.
  double row(std::int64_t b, std::int64_t h, std::int64_t i, double* dk, double* dv) const {
    const RowScratch scratch = workspace_.row(base_, omp_get_thread_num());
    const Scores scores(p, buffers_, b, h);
    const auto [softmax, d] = score_gradients(b, h, i, scratch);

    std::fill_n(scratch.dq, p.head_dim, 0.0);
    for (std::int64_t n = 0; n < softmax.visible; ++n) {
      const std::int64_t j = scratch.keys[n];
      const double dq_dot_k = scratch.ds[n] * scores.score_derivative(scratch.q_dot_k[n]);
      add_scaled(dq_dot_k, workspace_.k(base_, b, h / p.group()) + j * p.head_dim, p.head_dim, scratch.dq);
      add_scaled(dq_dot_k, scratch.q, p.head_dim, dk + j * p.head_dim);
      add_scaled(scratch.p[n] * scores.dropout_factor(i, j), scratch.dout, p.value_dim, dv + j * p.value_dim);
    }
    const std::int64_t batch = p.ragged ? 0 : b;
    store_elements(buffers_.dq, p.dtype, p.dq.at(batch, sequence(b).q_begin + i, h), p.head_dim, scratch.dq);

    const bool has_sink = scores.sink() != -std::numeric_limits<double>::infinity();
    return has_sink ? -softmax.p_sink * d : 0.0;
  }

  const Problem& p;
  const Buffers& buffers_;
  const Workspace& workspace_;
  double* base_;
};

void zero_unused(const Problem& p, const Buffers& buffers) {
  for (const RowRange& unused : p.unused_q) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      for (std::int64_t token = unused.begin; token < unused.end; ++token)
        fill_elements(buffers.dq, p.dtype, p.dq.at(unused.batch, token, h), p.head_dim, 0.0);
    }
  }
  for (const RowRange& unused : p.unused_k) {
    for (std::int64_t g = 0; g < p.heads_kv; ++g) {
      for (std::int64_t token = unused.begin; token < unused.end; ++token) {
        fill_elements(buffers.dk, p.dtype, p.dk.at(unused.batch, token, g), p.head_dim, 0.0);
        fill_elements(buffers.dv, p.dtype, p.dv.at(unused.batch, token, g), p.value_dim, 0.0);
      }
    }
  }
}

}  // namespace

void backward(const Problem& p, const Buffers& buffers, const Workspace& workspace, double* base, int threads) {
  widen_keys_and_values(p, buffers, workspace, base, threads);
  const Backward pass(p, buffers, workspace, base);

#pragma omp parallel for num_threads(threads) collapse(2) schedule(dynamic)
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t g = 0; g < p.heads_kv; ++g) pass.head(b, g);
  }

  // The scores are computed once more: that way no more than a row of dbias is in the workspace.
  if (p.need_dbias) {
#pragma omp parallel for num_threads(threads) collapse(3) schedule(dynamic)
    for (std::int64_t bb = 0; bb < p.bias_shape[0]; ++bb) {
      for (std::int64_t hh = 0; hh < p.bias_shape[1]; ++hh) {
        for (std::int64_t r = 0; r < p.bias_shape[2]; ++r) pass.bias_row(bb, hh, r);
      }
    }
  }

  if (p.need_dsinks) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      double sum = 0.0;
      for (std::int64_t b = 0; b < p.batch; ++b) sum += workspace.dsink(base, b, h);
      store_element(buffers.dsinks, HR_FLOAT32, h * p.dsinks_stride, sum);
    }
  }
  zero_unused(p, buffers);
}

}  // namespace headrace::reference
