#include "support/random.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numbers>
#include <random>
#include <string>

namespace headrace::test {
namespace {

class SeedPrinter : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo& info) override {
    if (info.result()->Failed())
      std::printf("repeat with HEADRACE_TEST_SEED=%llu\n", static_cast<unsigned long long>(run_seed()));
  }
};

[[maybe_unused]] const bool registered = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new SeedPrinter);
  return true;
}();

}  // namespace

std::uint64_t run_seed() {
  static const std::uint64_t seed = [] {
    if (const char* text = std::getenv("HEADRACE_TEST_SEED")) return std::uint64_t{std::strtoull(text, nullptr, 0)};
    std::random_device device;
    return (std::uint64_t{device()} << 32) | device();
  }();
  return seed;
}

double run_scale() {
  static const double scale = [] {
    const char* text = std::getenv("HEADRACE_TEST_SCALE");
    return text != nullptr ? std::strtod(text, nullptr) : 1.0;
  }();
  return scale;
}

int scaled(int n) { return std::max(1, static_cast<int>(std::lround(n * run_scale()))); }

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t z = a + 0x9E3779B97F4A7C15u * (b + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

std::uint64_t Rng::bits() {
  const std::uint64_t result = mix(state_, 0);
  state_ += 0x9E3779B97F4A7C15u;
  return result;
}

double Rng::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

std::int64_t Rng::integer(std::int64_t lo, std::int64_t hi) {
  const std::uint64_t count = static_cast<std::uint64_t>(hi) - static_cast<std::uint64_t>(lo) + 1;
  return lo + static_cast<std::int64_t>(count == 0 ? bits() : bits() % count);
}

double Rng::normal() {
  if (has_spare_) {
    has_spare_ = false;
    return spare_;
  }
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  const double angle = 2.0 * std::numbers::pi * uniform();
  spare_ = radius * std::sin(angle);
  has_spare_ = true;
  return radius * std::cos(angle);
}

Rng test_rng() {
  std::uint64_t seed = run_seed();
  if (const ::testing::TestInfo* info = ::testing::UnitTest::GetInstance()->current_test_info()) {
    for (const char c : std::string(info->test_suite_name()) + "." + info->name())
      seed = mix(seed, static_cast<unsigned char>(c));
  }
  return Rng(seed);
}

}  // namespace headrace::test
