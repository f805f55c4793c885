// The scratch memory of the reference: a size when planning, arrays when executing. It grows with the
// number of tokens, never with their product.
#pragma once

#include <cstddef>
#include <cstdint>

#include "describe/problem.hpp"

namespace headrace::reference {

// What a thread needs for the row (b, h, i) that it works on.
struct RowScratch {
  double *q, *dout;    // [head_dim], [value_dim]: the inputs of the row
  double *dq, *out;    // [head_dim], [value_dim]: its results
  double* dbias;       // [seqlen_k]: one row of dbias
  std::int64_t* keys;  // [seqlen_k]: the keys that the row sees; the arrays below go along with them
  double* q_dot_k;
  double* p;   // before dropout
  double* dp;  // the gradient of p
  double* ds;  // the gradient of the score
};

class Workspace {
 public:
  // Throws Failure where the size does not fit 63 bits.
  Workspace(const Problem& problem, int threads);

  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(doubles_) * sizeof(double); }
  [[nodiscard]] std::size_t bytes_per_thread() const { return static_cast<std::size_t>(row_doubles_) * sizeof(double); }

  // The arrays, where the caller's workspace starts at `base`. Key-value head g of sequence b has
  // k, dk [k_len, head_dim] and v, dv [k_len, value_dim]; the gradients in the backward pass only.
  [[nodiscard]] double* k(double* base, std::int64_t b, std::int64_t g) const {
    return base + tokens(b, g) * problem_.head_dim;
  }
  [[nodiscard]] double* v(double* base, std::int64_t b, std::int64_t g) const {
    return base + v_begin_ + tokens(b, g) * problem_.value_dim;
  }
  [[nodiscard]] double* dk(double* base, std::int64_t b, std::int64_t g) const { return k(base + kv_doubles_, b, g); }
  [[nodiscard]] double* dv(double* base, std::int64_t b, std::int64_t g) const { return v(base + kv_doubles_, b, g); }

  // The part of sequence b in the gradient of the sink of head h.
  [[nodiscard]] double& dsink(double* base, std::int64_t b, std::int64_t h) const {
    return base[dsinks_begin_ + b * problem_.heads_q + h];
  }

  [[nodiscard]] RowScratch row(double* base, int thread) const;

 private:
  // The keys of all heads of the sequences before b, and of the heads of b before g.
  [[nodiscard]] std::int64_t tokens(std::int64_t b, std::int64_t g) const {
    const Sequence& s = problem_.sequences[static_cast<std::size_t>(b)];
    return (problem_.ragged ? s.k_begin : b * problem_.seqlen_k) * problem_.heads_kv + g * s.k_len;
  }

  const Problem& problem_;
  std::int64_t v_begin_ = 0, kv_doubles_ = 0, dsinks_begin_ = 0, rows_begin_ = 0;
  std::int64_t row_doubles_ = 0, doubles_ = 0;
};

}  // namespace headrace::reference
