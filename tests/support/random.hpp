// Random numbers of the tests: fresh in every run, repeatable by environment.
//
//   HEADRACE_TEST_SEED=n   seed of the run; printed by every failing test
//   HEADRACE_TEST_SCALE=x  scales how many random problems are tried (1 = normal)
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace headrace::test {

std::uint64_t run_seed();
double run_scale();

// n scaled by HEADRACE_TEST_SCALE, at least 1.
int scaled(int n);

// Whether tests of one large size should run: not where a small scale asks for little, as under sanitizers and
// emulators.
inline bool run_is_full() { return run_scale() >= 0.5; }

// A good 64-bit mix of both arguments (splitmix64).
std::uint64_t mix(std::uint64_t a, std::uint64_t b);

// Not of <random>: its distributions differ between standard libraries, and a seed should name one
// problem everywhere.
class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits();
  double uniform();                                        // [0, 1)
  std::int64_t integer(std::int64_t lo, std::int64_t hi);  // both inclusive
  bool chance(double probability) { return uniform() < probability; }
  double normal();

  template <typename T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + integer(0, static_cast<std::int64_t>(values.size()) - 1));
  }

 private:
  std::uint64_t state_;
  double spare_ = 0.0;
  bool has_spare_ = false;
};

// Generator of the running test: of the run's seed and the test's name, so that a test run alone
// repeats what it did among the others.
Rng test_rng();

}  // namespace headrace::test
