// Attention over two keys with equal scores is the mean of their values.
#include <cstdio>
#include <headrace/headrace.hpp>
#include <vector>

int main() {
  const std::vector<float> q(8, 1.0f), k(2 * 8, 0.5f), v = {1.0f, -2.0f, 3.0f, 6.0f};
  std::vector<float> out(2), lse(1);
  const headrace::Attention attention{.q = {q.data(), {1, 1, 1, 8}},
                                      .k = {k.data(), {1, 2, 1, 8}},
                                      .v = {v.data(), {1, 2, 1, 2}},
                                      .out = {out.data(), {1, 1, 1, 2}},
                                      .lse = {lse.data(), {1, 1, 1}},
                                      .backend = headrace::Backend::reference};
  headrace::forward(attention);
  std::printf("C++ %s: out = %g %g, lse = %g\n", headrace::version().data(), out[0], out[1], lse[0]);
  if (out[0] != 2.0f || out[1] != 2.0f) return 1;

  headrace::Attention wrong = attention;
  wrong.softcap = -1.0;
  try {
    headrace::forward(wrong);
  } catch (const headrace::Error& error) {
    std::printf("C++ error: %s\n", error.what());
    return error.status() == HR_ERROR_VALUE ? 0 : 2;
  }
  return 3;
}
