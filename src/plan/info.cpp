#include <omp.h>

#include <exception>
#include <nlohmann/json.hpp>
#include <string>

#include "cpu/targets.hpp"
#include "cuda/driver/devices.hpp"
#include "cuda/driver/disk_cache.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/driver/nvrtc.hpp"
#include "cuda/driver/precompiled.hpp"
#include "headrace/headrace.h"

namespace {

using Json = nlohmann::ordered_json;

Json simd() {
  Json report = {{"chosen", nullptr}, {"available", headrace::cpu::available_targets()}};
  try {
    report["chosen"] = headrace::cpu::chosen_target();
  } catch (const std::exception& error) {  // HEADRACE_SIMD names a target that this machine lacks
    report["error"] = error.what();
  }
  return report;
}

Json gpu() {
  namespace cuda = headrace::cuda;
  const cuda::DriverStatus& driver = cuda::driver_status();
  const cuda::DeviceList& list = cuda::list_devices();
  Json report = {{"driver_found", driver.found}, {"driver_version", nullptr}, {"devices", Json::array()}};
  if (driver.version != 0) report["driver_version"] = cuda::version_text(driver.version);
  for (const cuda::Device& device : list.devices)
    report["devices"].push_back(
        {{"name", device.name},
         {"compute_capability", std::to_string(device.compute_major) + "." + std::to_string(device.compute_minor)},
         {"multiprocessors", device.multiprocessors},
         {"memory_bytes", device.memory_bytes}});
  if (!list.error.empty()) report["error"] = list.error;

  const cuda::NvrtcStatus& nvrtc = cuda::nvrtc_status();
  report["nvrtc"] = {{"version", nullptr}};
  if (nvrtc.error.empty())
    report["nvrtc"] = {{"version", cuda::version_text(nvrtc.version)}, {"path", nvrtc.path}};
  else
    report["nvrtc"]["error"] = nvrtc.error;

  const cuda::PrecompiledSize precompiled = cuda::precompiled_size();
  report["precompiled"] = {{"kernels", precompiled.kernels}, {"bytes", precompiled.bytes}};
  if (cuda::embedded_pack().empty()) report["precompiled"]["error"] = "the library was built without NVRTC";
  const cuda::DiskCache cache(cuda::DiskCache::default_folder());
  const cuda::DiskCache::Usage usage = cache.usage();
  report["cache"] = {
      {"folder", nullptr}, {"kernels", usage.entries}, {"bytes", usage.bytes}, {"max_bytes", cache.max_bytes()}};
  if (!cache.folder().empty()) report["cache"]["folder"] = cache.folder();
  return report;
}

std::string describe_machine() {
  const Json report = {{"version", hr_version()},
                       {"simd", simd()},
                       {"threads", omp_get_max_threads()},
                       {"openmp", _OPENMP},
                       {"gpu", gpu()}};
  // A driver may name a device in any encoding.
  return report.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

const char* hr_info(void) {
  try {
    static const std::string text = describe_machine();
    return text.c_str();
  } catch (const std::exception&) {  // out of memory; the next call tries again
    return "{}";
  }
}
