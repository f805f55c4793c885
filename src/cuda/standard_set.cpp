#include "cuda/standard_set.hpp"

#include "cuda/launch/backward_source.hpp"
#include "cuda/launch/hopper_forward_source.hpp"
#include "cuda/launch/hopper_split_forward_source.hpp"
#include "cuda/launch/pack_rows_source.hpp"

namespace headrace::cuda {

std::vector<KernelSource> standard_set() {
  std::vector<KernelSource> set;
  for (const auto& part :
       {hopper_forward_standard_set(), hopper_split_standard_set(), backward_standard_set(), pack_rows_standard_set()})
    set.insert(set.end(), part.begin(), part.end());
  return set;
}

}  // namespace headrace::cuda
