// The GPUs that the CUDA driver reports.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace headrace::cuda {

struct Device {
  std::string name;
  int compute_major = 0, compute_minor = 0;
  int multiprocessors = 0;
  std::size_t memory_bytes = 0;
  std::size_t l2_bytes = 0;
  std::size_t shared_bytes = 0;  // shared memory that one block can have
};

struct DeviceList {
  std::string error;  // why there are none; empty if the driver answered
  std::vector<Device> devices;
};

// Asked once in a process; throws nothing but bad_alloc.
const DeviceList& list_devices();

// What a kernel is compiled for, of compute capability 9.0: "sm_90a". From 9 on the feature set of exactly this
// architecture is used (wgmma, setmaxnreg).
std::string architecture(int compute_major, int compute_minor);

}  // namespace headrace::cuda
