#include "on_demand_sample.hpp"

namespace headrace::cuda {

std::vector<KernelSource> on_demand_sample() {
  return {
      {"scale", "test/scale.cuh", {{"FACTOR", 3}, {"THREADS", 256}}},
      {"wgmma", "test/wgmma.cuh", {}},
  };
}

}  // namespace headrace::cuda
