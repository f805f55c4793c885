#include "cuda/driver/devices.hpp"

#include <fmt/format.h>

#include <array>

#include "cuda/driver/driver.hpp"
#include "describe/problem.hpp"

namespace headrace::cuda {
namespace {

Device describe(int ordinal) {
  const Driver& cuda = driver();
  CUdevice handle = 0;
  check(cuda.cuDeviceGet(&handle, ordinal), "cuDeviceGet");
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    check(cuda.cuDeviceGetAttribute(&value, which, handle), "cuDeviceGetAttribute");
    return value;
  };
  Device device;
  std::array<char, 256> name{};
  check(cuda.cuDeviceGetName(name.data(), static_cast<int>(name.size()) - 1, handle), "cuDeviceGetName");
  device.name = name.data();
  device.compute_major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  device.compute_minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  device.multiprocessors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  device.l2_bytes = static_cast<std::size_t>(attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE));
  device.shared_bytes = static_cast<std::size_t>(attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN));
  check(cuda.cuDeviceTotalMem(&device.memory_bytes, handle), "cuDeviceTotalMem");
  return device;
}

DeviceList ask() {
  DeviceList list;
  list.error = driver_status().error;
  if (!list.error.empty()) return list;
  try {
    int count = 0;
    check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
    for (int i = 0; i < count; ++i) list.devices.push_back(describe(i));
  } catch (const Failure& failure) {
    list.error = failure.what();
  }
  return list;
}

}  // namespace

const DeviceList& list_devices() {
  static const DeviceList list = ask();
  return list;
}

std::string architecture(int compute_major, int compute_minor) {
  return fmt::format("sm_{}{}{}", compute_major, compute_minor, compute_major >= 9 ? "a" : "");
}

}  // namespace headrace::cuda
