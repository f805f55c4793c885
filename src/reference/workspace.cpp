#include "reference/workspace.hpp"

#include <algorithm>

namespace headrace::reference {
namespace {

void check(bool overflow) {
  if (overflow) throw Failure(HR_ERROR_RUNTIME, "backend: the reference would need more than 2^63 bytes of workspace");
}

std::int64_t sum(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  check(__builtin_add_overflow(a, b, &result));
  return result;
}

std::int64_t product(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  check(__builtin_mul_overflow(a, b, &result));
  return result;
}

}  // namespace

Workspace::Workspace(const Problem& problem, int threads) : problem_(problem) {
  std::int64_t keys = product(problem.batch, problem.seqlen_k);
  if (problem.ragged) {
    keys = 0;
    for (const Sequence& s : problem.sequences) keys = std::max(keys, sum(s.k_begin, s.k_len));
  }
  const std::int64_t tokens = product(keys, problem.heads_kv);
  v_begin_ = product(tokens, problem.head_dim);
  kv_doubles_ = sum(v_begin_, product(tokens, problem.value_dim));

  const bool backward = problem.pass == Pass::backward;
  dsinks_begin_ = backward ? product(2, kv_doubles_) : kv_doubles_;
  rows_begin_ = sum(dsinks_begin_, backward ? product(problem.batch, problem.heads_q) : 0);

  // A cache line of slack keeps threads off one another's lines.
  const std::int64_t dims = 2 * (problem.head_dim + problem.value_dim) + 8;
  row_doubles_ = sum(dims, product(6, problem.seqlen_k));
  doubles_ = sum(rows_begin_, product(threads, row_doubles_));
  product(doubles_, sizeof(double));
}

RowScratch Workspace::row(double* base, int thread) const {
  static_assert(sizeof(std::int64_t) == sizeof(double));
  double* next = base + rows_begin_ + thread * row_doubles_;
  auto take = [&next](std::int64_t count) {
    double* taken = next;
    next += count;
    return taken;
  };
  RowScratch row;
  row.q = take(problem_.head_dim);
  row.dout = take(problem_.value_dim);
  row.dq = take(problem_.head_dim);
  row.out = take(problem_.value_dim);
  row.dbias = take(problem_.seqlen_k);
  row.keys = reinterpret_cast<std::int64_t*>(take(problem_.seqlen_k));
  row.q_dot_k = take(problem_.seqlen_k);
  row.p = take(problem_.seqlen_k);
  row.dp = take(problem_.seqlen_k);
  row.ds = take(problem_.seqlen_k);
  return row;
}

}  // namespace headrace::reference
