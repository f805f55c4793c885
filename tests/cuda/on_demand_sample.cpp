#include "on_demand_sample.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/standard_set.hpp"

namespace headrace::cuda {
namespace {

long long constant_of(const KernelSource& source, const std::string& name) {
  for (const auto& [constant, value] : source.constants)
    if (constant == name) return value;
  return 0;
}

KernelSource with(KernelSource source, const std::string& name, long long value) {
  for (auto& [constant, old] : source.constants)
    if (constant == name) {
      old = value;
      return source;
    }
  throw std::logic_error(name_of(source) + " has no constant " + name);
}

constexpr const char* options[] = {"SOFTCAP", "ALIBI", "BIAS", "MASK", "BLOCK_MASK", "SINKS", "DROPOUT"};

KernelSource standard_kernel(const std::string& entry, int head_dim = 128) {
  const std::vector<KernelSource> set = standard_set();
  const auto kernel = std::find_if(set.begin(), set.end(), [&](const KernelSource& source) {
    return source.entry == entry && constant_of(source, "HEAD_DIM") == head_dim;
  });
  if (kernel == set.end())
    throw std::logic_error("the standard set has no " + entry + " with HEAD_DIM " + std::to_string(head_dim));
  return *kernel;
}

KernelSource with_all_options(KernelSource source) {
  for (const char* option : options) source = with(source, option, option == std::string("BIAS") ? 2 : 1);
  return source;
}

// Each option alone.
void add_hopper_forward(std::vector<KernelSource>& sample) {
  const KernelSource base = standard_kernel("hopper_forward");
  sample.push_back(with(base, "SMALL_SCALE", 0));
  for (const int bias : {2, 3}) sample.push_back(with(base, "BIAS", bias));
  sample.push_back(with(standard_kernel("hopper_forward", 64), "BIAS", 3));
  for (const char* option : options) sample.push_back(with(base, option, 1));
}

// All options at once, the shapes with most code; of the backward pass dropout, a bias and its gradient alone, too.
void add_all_options(std::vector<KernelSource>& sample) {
  sample.push_back(with_all_options(with(standard_kernel("hopper_forward"), "PAIRED", 1)));
  for (const int head_dim : {64, 128}) {
    sample.push_back(with_all_options(with(standard_kernel("hopper_split_forward", head_dim), "PAIRED", 1)));
    const KernelSource backward = with(standard_kernel("hopper_backward", head_dim), "DETERMINISTIC", 1);
    sample.push_back(with_all_options(backward));
    sample.push_back(with(backward, "DROPOUT", 1));
    sample.push_back(with(with(backward, "BIAS", 1), "DBIAS", 1));
    const KernelSource loading = with(with(with(backward, "BIAS", 3), "STAGES", 2), "BIAS_STAGES", head_dim / 64);
    sample.push_back(loading);
    sample.push_back(with(loading, "DBIAS", 2));
  }
  for (const char* entry : {"hopper_backward_keys", "hopper_backward_queries"}) {
    sample.push_back(with_all_options(standard_kernel(entry, 256)));
    sample.push_back(with(standard_kernel(entry, 256), "DROPOUT", 1));
  }
  // The gradient of a bias of float32 in a bfloat16 problem.
  const KernelSource gradient = standard_kernel("backward_gradient", 0);
  sample.push_back(with_all_options(with(with(gradient, "TARGET", 1), "COLUMNS", 128)));
  sample.push_back(with_all_options(with(with(with(gradient, "TARGET", 3), "FLOAT32", 0), "COLUMNS", 64)));
}

}  // namespace

std::vector<KernelSource> on_demand_sample() {
  std::vector<KernelSource> sample = {
      {"scale", "test/scale.cuh", {{"FACTOR", 3}, {"THREADS", 256}}},
      {"wgmma", "test/wgmma.cuh", {}},
      {"gemm", "test/gemm.cuh", {{"FLOAT16", 0}, {"WIDTH", 256}, {"LEFT_IN_REGISTERS", 1}, {"TRANS_B", 1}}},
      {"arithmetic", "test/arithmetic.cuh", {{"FLOAT16", 1}}},
  };
  add_hopper_forward(sample);
  add_all_options(sample);
  return sample;
}

}  // namespace headrace::cuda
