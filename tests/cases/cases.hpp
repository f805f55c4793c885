// What the cases share: every test runs on each backend and in each dtype.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "support/compare.hpp"

namespace headrace::test {

class BackendAndType : public ::testing::TestWithParam<std::tuple<Backend, DType>> {
 protected:
  [[nodiscard]] Backend backend() const { return std::get<0>(GetParam()); }
  [[nodiscard]] DType dtype() const { return std::get<1>(GetParam()); }
  // A dense call of this test's dtype; lse in float64 where that is allowed.
  [[nodiscard]] Spec spec(std::int64_t batch, std::int64_t heads_kv, std::int64_t group, std::int64_t seqlen_q,
                          std::int64_t seqlen_k, std::int64_t dim) const {
    Spec s;
    s.seed = test_rng().bits();
    s.dtype = dtype();
    s.lse_float64 = dtype() == DType::float64;
    s.batch = batch;
    s.heads_kv = heads_kv;
    s.group = group;
    s.seqlen_q = seqlen_q;
    s.seqlen_k = seqlen_k;
    s.head_dim = s.value_dim = dim;
    s.threads = 2;
    return s;
  }
  // Half a unit in the last place of 1, with room for a few operations.
  [[nodiscard]] double tolerance() const {
    switch (dtype()) {
      case DType::float64:
        return 1e-14;
      case DType::float16:
        return 1e-3;
      case DType::bfloat16:
        return 8e-3;
      default:
        return 2e-6;
    }
  }
};

// The rest of the arguments are the backends.
#define HEADRACE_CASES(suite, ...)                                                                            \
  INSTANTIATE_TEST_SUITE_P(                                                                                   \
      Cases, suite,                                                                                           \
      ::testing::Combine(::testing::Values(__VA_ARGS__),                                                      \
                         ::testing::Values(DType::float32, DType::bfloat16, DType::float16, DType::float64)), \
      [](const auto& test) {                                                                                  \
        return std::string(std::get<0>(test.param) == Backend::cpu ? "cpu_" : "reference_") +                 \
               name_of(std::get<1>(test.param));                                                              \
      })

// Row-major values with their indices.
class Grid {
 public:
  Grid(const std::vector<double>& values, Shape shape) : values_(values), shape_(std::move(shape)) {}

  template <typename... Indices>
  double operator()(Indices... indices) const {
    std::size_t at = 0, dim = 0;
    ((at = at * static_cast<std::size_t>(shape_[dim++]) + static_cast<std::size_t>(indices)), ...);
    return values_[at];
  }
  // The vector at the leading indices.
  template <typename... Indices>
  std::vector<double> row(Indices... indices) const {
    const auto size = static_cast<std::size_t>(shape_.back());
    std::size_t at = 0, dim = 0;
    ((at = at * static_cast<std::size_t>(shape_[dim++]) + static_cast<std::size_t>(indices)), ...);
    return {values_.begin() + static_cast<std::ptrdiff_t>(at * size),
            values_.begin() + static_cast<std::ptrdiff_t>((at + 1) * size)};
  }

 private:
  std::vector<double> values_;
  Shape shape_;
};

inline Grid out_of(const Call& call, const Results& r) { return {r.out, call.out.shape()}; }
inline Grid lse_of(const Call& call, const Results& r) { return {r.lse, call.lse.shape()}; }
inline Grid dq_of(const Call& call, const Results& r) { return {r.dq, call.q.shape()}; }
inline Grid dk_of(const Call& call, const Results& r) { return {r.dk, call.k.shape()}; }
inline Grid dv_of(const Call& call, const Results& r) { return {r.dv, call.v.shape()}; }

inline std::vector<double> constant(const Array& like, double value) {
  return std::vector<double>(static_cast<std::size_t>(like.size()), value);
}

// Queries 0 and values the identity: out[i, j] is then 1 / n where key j is visible to query i, and that
// tells which keys are. head_dim is free, value_dim must be seqlen_k.
inline void show_visible_keys(Call& call) {
  call.q.fill(constant(call.q, 0.0));
  const Shape shape = call.v.shape();
  std::vector<double> identity = constant(call.v, 0.0);
  const auto keys = static_cast<std::size_t>(shape[1]), heads = static_cast<std::size_t>(shape[2]);
  for (std::size_t row = 0; row < identity.size() / keys; ++row) identity[row * keys + row / heads % keys] = 1.0;
  call.v.fill(identity);
}

// Expects of a call of show_visible_keys that visible(i, j) holds for just the keys that count, alike.
template <typename Visible>
void expect_visible_keys(const Call& call, const Results& results, double tolerance, Visible&& visible) {
  const Shape shape = call.out.shape();
  const Grid out = out_of(call, results), lse = lse_of(call, results);
  for (std::int64_t b = 0; b < shape[0]; ++b)
    for (std::int64_t i = 0; i < shape[1]; ++i)
      for (std::int64_t h = 0; h < shape[2]; ++h) {
        int count = 0;
        for (std::int64_t j = 0; j < shape[3]; ++j) count += visible(i, j) ? 1 : 0;
        if (count == 0) {
          EXPECT_EQ(lse(b, h, i), -infinity) << "row " << i;
        } else {
          EXPECT_NEAR(lse(b, h, i), std::log(count), 1e-5) << "row " << i;
        }
        for (std::int64_t j = 0; j < shape[3]; ++j)
          EXPECT_NEAR(out(b, i, h, j), visible(i, j) ? 1.0 / count : 0.0, visible(i, j) ? tolerance : 0.0)
              << "row " << i << " key " << j;
      }
}

}  // namespace headrace::test
