// Random calls over the whole option space: the CPU against the float64 reference, element by element.
//
//   HEADRACE_TEST_SEED, HEADRACE_TEST_SCALE: see support/random.hpp
//   HEADRACE_TEST_PROBLEM=n  runs only the problem of this number, which a failure prints
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>

#include "support/compare.hpp"
#include "support/standard_attention.hpp"

namespace headrace::test {
namespace {

constexpr double small_cost = 1.5e6;  // multiply-adds of a forward pass
constexpr double large_cost = 4e7;

struct Member {
  const char* name;
  double Errors::*error;
};
constexpr std::array<Member, 7> members{{{"out", &Errors::out},
                                         {"lse", &Errors::lse},
                                         {"dq", &Errors::dq},
                                         {"dk", &Errors::dk},
                                         {"dv", &Errors::dv},
                                         {"dbias", &Errors::dbias},
                                         {"dsinks", &Errors::dsinks}}};

struct Judged {
  std::string failure;
  bool comparable = false;   // both of these are known
  Errors cpu{}, standard{};  // root mean square, in units of the bounds
};

Judged judge(const Spec& spec) {
  Call call = make_call(spec);
  const Outcome outcome = run(call, Backend::cpu);
  Judged judged{.failure = outcome.failure};
  const Results exact = exact_results(call);
  if (outcome.results.out.size() != exact.out.size() || outcome.results.dk.size() != exact.dk.size()) return judged;
  const Results bounds = error_bounds(DenseCall(call), exact, spec.dtype, call.lse.dtype(), call.bias.dtype());
  judged.failure += differences(call, outcome.results, exact, bounds);
  // In float64 the reference rounds as much as what it judges, and where all inputs are equal all elements
  // share one rounding error: no ratio means anything there.
  if (spec.dtype == DType::float64 || spec.inputs == Inputs::equal) return judged;
  judged.comparable = true;
  judged.cpu = relative_errors(outcome.results, exact, bounds);
  judged.standard = relative_errors(standard_attention(call), exact, bounds);
  // The bounds are for single elements, and what is typical lies far inside; so must all of them together. The
  // constant is for problems of few independent roundings, where the standard may have none by luck.
  for (const Member& member : members) {
    const double cpu = judged.cpu.*member.error, standard = judged.standard.*member.error;
    if (!(cpu > 2.0 * standard + 0.5)) continue;
    std::ostringstream text;
    text << "  " << member.name << ": the error is " << cpu << " of the bounds, that of standard attention " << standard
         << '\n';
    judged.failure += text.str();
  }
  return judged;
}

// Mean squares over many problems of the errors of the CPU and of standard attention.
class Ledger {
 public:
  void add(DType dtype, const Judged& judged) {
    for (std::size_t i = 0; i < members.size(); ++i) {
      const double cpu = judged.cpu.*members[i].error, standard = judged.standard.*members[i].error;
      if (std::isnan(cpu) || std::isnan(standard)) continue;
      Sums& sums = sums_[dtype][i];
      sums.cpu += cpu * cpu;
      sums.standard += standard * standard;
      ++sums.count;
    }
  }

  // "Never worse than twice the error of standard attention", over enough problems that luck evens out.
  void expect_at_most_twice_standard() const {
    for (const auto& [dtype, all] : sums_) {
      for (std::size_t i = 0; i < members.size(); ++i) {
        const Sums& sums = all[i];
        if (sums.count < 50) continue;
        const double cpu = std::sqrt(sums.cpu / sums.count), standard = std::sqrt(sums.standard / sums.count);
        std::printf("%-9s %-6s error in units of the bounds: cpu %.4f, standard attention %.4f (%d problems)\n",
                    name_of(dtype), members[i].name, cpu, standard, sums.count);
        EXPECT_LE(cpu, 2.0 * standard + 0.01) << name_of(dtype) << ' ' << members[i].name;
      }
    }
  }

 private:
  struct Sums {
    double cpu = 0.0, standard = 0.0;
    int count = 0;
  };
  std::map<DType, std::array<Sums, members.size()>> sums_;
};

using Draw = Spec (*)(Rng&, double);

// `count` problems; each has a number of its own, so that it can be run alone.
void cross_check(Draw draw, double max_cost, int count) {
  Rng numbers = test_rng();
  Ledger ledger;
  const char* only = std::getenv("HEADRACE_TEST_PROBLEM");
  int failures = 0;
  for (int n = 0; n < count && failures < 5; ++n) {
    const std::uint64_t number = only != nullptr ? std::strtoull(only, nullptr, 0) : numbers.bits();
    if (only != nullptr) n = count;
    Rng rng(number);
    const Spec spec = draw(rng, max_cost);
    const Judged judged = judge(spec);
    if (judged.comparable) ledger.add(spec.dtype, judged);
    if (judged.failure.empty()) continue;
    ++failures;
    const Spec simple = minimized(
        spec, [](const Spec& s) { return !check(s).empty(); }, 6.0);
    ADD_FAILURE() << "problem " << number << ": " << spec.describe() << '\n'
                  << judged.failure << "simplest: " << simple.describe() << '\n'
                  << judge(simple).failure;
  }
  ledger.expect_at_most_twice_standard();
}

class SmallProblems : public ::testing::TestWithParam<int> {};

TEST_P(SmallProblems, CpuAgreesWithReference) { cross_check(random_spec, small_cost, scaled(900)); }

INSTANTIATE_TEST_SUITE_P(CrossCheck, SmallProblems, ::testing::Range(0, 4));

class LargeProblems : public ::testing::TestWithParam<int> {};

TEST_P(LargeProblems, CpuAgreesWithReference) { cross_check(random_large_spec, large_cost, scaled(16)); }

INSTANTIATE_TEST_SUITE_P(CrossCheckHeavy, LargeProblems, ::testing::Range(0, 4));

}  // namespace
}  // namespace headrace::test
