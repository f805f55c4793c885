// The GPUs that the CUDA driver reports. libcuda is opened at run time: a machine without it is no error.
#pragma once

#include <string>
#include <vector>

namespace headrace::cuda {

struct DeviceList {
  bool driver_found = false;
  std::string error;  // why there are no devices; empty if the driver answered
  std::vector<std::string> names;
};

DeviceList list_devices();

}  // namespace headrace::cuda
