// Causal attention of four heads over a sequence, from C++.
#include <cstdio>
#include <vector>

#include "headrace/headrace.hpp"

int main() {
  const std::int64_t batch = 1, seqlen = 256, heads = 4, dim = 64;
  std::vector<float> q(batch * seqlen * heads * dim, 0.5f), k(q), v(q), out(q.size());

  headrace::forward({.q = {q.data(), {batch, seqlen, heads, dim}},
                     .k = {k.data(), {batch, seqlen, heads, dim}},
                     .v = {v.data(), {batch, seqlen, heads, dim}},
                     .out = {out.data(), {batch, seqlen, heads, dim}},
                     .causal = headrace::Causal::bottom_right});

  std::printf("out[0] = %g\n", static_cast<double>(out[0]));  // the mean of equal values: 0.5
}
