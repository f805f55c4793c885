#include <omp.h>

#include <exception>
#include <nlohmann/json.hpp>
#include <string>

#include "cpu/targets.hpp"
#include "cuda/driver/devices.hpp"
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
  const headrace::cuda::DeviceList list = headrace::cuda::list_devices();
  Json report = {{"driver_found", list.driver_found}, {"devices", Json::array()}};
  for (const std::string& name : list.names) report["devices"].push_back({{"name", name}});
  if (!list.error.empty()) report["error"] = list.error;
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
