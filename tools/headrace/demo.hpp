// What the demo found, as its report shows it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "contract.hpp"
#include "nlohmann/json.hpp"

namespace headrace::tool {

// Of one head: relative Frobenius errors, and the largest absolute error of the lse.
struct Errors {
  double out = 0.0, dq = 0.0, dk = 0.0, dv = 0.0, lse = 0.0;
  [[nodiscard]] double worst_gradient() const;
};
// What is compared, in the order in which it is shown.
struct ErrorKind {
  const char* name;
  double Errors::*member;
};
inline constexpr ErrorKind error_kinds[] = {
    {"out", &Errors::out}, {"dq", &Errors::dq}, {"dk", &Errors::dk}, {"dv", &Errors::dv}, {"lse", &Errors::lse}};

struct HeadErrors {
  std::int64_t layer = 0, head = 0;
  Errors ours, standard;  // against float64, of Headrace and of rounded_attention
  double peak = 0.0;      // mean over rows of the largest probability
};

// Every head of every layer in one dtype under one mask, and the contract: what is promised for inputs like
// N(0, 1), and on any input twice the error of standard attention in the same dtype.
struct ErrorsByHead {
  std::string dtype;
  bool causal = false;
  Errors promised;
  std::vector<HeadErrors> heads;

  [[nodiscard]] double worst(double Errors::*member) const;
  [[nodiscard]] bool within_promise(const HeadErrors& head) const;
  [[nodiscard]] bool within_contract(const HeadErrors& head) const;
  [[nodiscard]] std::vector<HeadErrors> beyond_promise() const;
  [[nodiscard]] std::int64_t broken() const;
};

struct DemoResult {
  std::map<std::string, std::string> metadata;  // of the data file
  nlohmann::json machine;                       // hr_info()
  std::int64_t layers = 0, tokens = 0, heads = 0, dim = 0;
  std::vector<ErrorsByHead> errors;
  std::int64_t stretched_layer = 0, stretched_head = 0;
  int threads = 0;
  std::string blas;                       // "" where there is none
  std::vector<nlohmann::json> stretched;  // rows of run_contest
  double stretched_contract = 0.0;
  double seconds = 0.0;

  [[nodiscard]] std::int64_t broken() const;  // heads and lengths outside the contract
  [[nodiscard]] std::int64_t checked() const;
};

// Standard deviation of the noise that makes a repeated token differ from its copies, of the tensor's own.
inline constexpr double stretch_noise = 0.1;

// The self-contained HTML page.
std::string html_report(const DemoResult& result);

}  // namespace headrace::tool
