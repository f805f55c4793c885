// Headrace against standard attention on the same tensors: time, peak memory, error.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "array.hpp"
#include "gpu.hpp"
#include "measure.hpp"
#include "nlohmann/json.hpp"
#include "standard_attention.hpp"

namespace headrace::tool {

struct Contest {
  StandardShape shape;
  DType dtype = DType::float32;
  int threads = 1;
  bool backward = false;
  // Plan, workspace and scores are made once, outside the clock, not in every call.
  bool preallocate = false;
  int rounds = 5;
  double budget_seconds = 20.0;
  std::string blas;                      // as Blas wants it
  std::string standard_problem;          // why standard attention cannot run at all, or ""
  std::uint64_t standard_max_bytes = 0;  // standard attention is skipped where its scores take more
  // q, k, v and, for backward, dout: [1, seqlen, heads, dim] of dtype. Called in several processes; must
  // return the same every time.
  std::function<Tensors(const Contest&)> inputs;
};

// {"seqlen", "headrace": RUN, "standard": RUN or {"skipped": why, "needs_bytes"}, "speedup"}, where RUN is
// {"seconds" (median), "seconds_all", "gflops", "peak_bytes" (above the tensors), "error" (relative, of out
// and, with backward, dq, over a sample of rows)}; of standard attention also "threading" and "blas".
//
// Each peak is that of a fresh process; times are of alternating runs in another.
nlohmann::json run_contest(const Contest& contest, Progress& progress);

// The same of the forward pass on a GPU, where standard attention is not measured: "seconds" are the device's, and
// "peak_bytes" the workspace of the plan.
nlohmann::json run_on_gpu(const Contest& contest, const Gpu& gpu);

// Whether a BLAS can be loaded: what it calls itself, or what is wrong.
struct BlasProbe {
  std::string description, problem;
};
BlasProbe probe_blas(const std::string& path);

// JSON has no NaN; it travels as null.
double number_or_nan(const nlohmann::json& value);

// Threads that the library uses by default.
int default_threads();

}  // namespace headrace::tool
