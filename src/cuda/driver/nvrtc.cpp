#include "cuda/driver/nvrtc.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cuda/driver/driver.hpp"
#include "describe/problem.hpp"

namespace headrace::cuda {
namespace {

namespace fs = std::filesystem;

// NVRTC's binary interface. Source: NVRTC user guide, section "User interface".
using nvrtcResult = int;
using nvrtcProgram = struct _nvrtcProgram*;
constexpr nvrtcResult nvrtc_success = 0, nvrtc_compilation_error = 6;

struct Functions {
  nvrtcResult (*version)(int* major, int* minor) = nullptr;
  const char* (*error_string)(nvrtcResult) = nullptr;
  nvrtcResult (*create)(nvrtcProgram*, const char* text, const char* name, int headers, const char* const* header_texts,
                        const char* const* header_names) = nullptr;
  nvrtcResult (*destroy)(nvrtcProgram*) = nullptr;
  nvrtcResult (*compile)(nvrtcProgram, int options, const char* const* option_texts) = nullptr;
  nvrtcResult (*cubin_size)(nvrtcProgram, std::size_t*) = nullptr;
  nvrtcResult (*cubin)(nvrtcProgram, char*) = nullptr;
  nvrtcResult (*log_size)(nvrtcProgram, std::size_t*) = nullptr;
  nvrtcResult (*log)(nvrtcProgram, char*) = nullptr;
};

struct Library {
  Functions call;
  NvrtcStatus status;
};

// An older driver does not load what a compiler of a newer major version made, but a newer driver loads all.
std::vector<std::string> library_names() {
  std::vector<std::string> names = {"libnvrtc.so.13", "libnvrtc.so.12"};
  const int driver_version = driver_status().version;
  if (driver_version != 0 && driver_version < 13000) std::swap(names[0], names[1]);
  return names;
}

// .../site-packages of every loaded library that lies in one: where pip has put NVIDIA's packages.
std::vector<fs::path> package_folders() {
  std::vector<fs::path> folders;
  const auto collect = [](dl_phdr_info* info, std::size_t, void* data) {
    const std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
    for (const std::string_view name : {"/site-packages/", "/dist-packages/"}) {
      const std::size_t at = path.find(name);
      if (at == std::string_view::npos) continue;
      auto& found = *static_cast<std::vector<fs::path>*>(data);
      fs::path folder = path.substr(0, at + name.size());
      if (std::find(found.begin(), found.end(), folder) == found.end()) found.push_back(std::move(folder));
    }
    return 0;
  };
  dl_iterate_phdr(collect, &folders);
  return folders;
}

std::vector<fs::path> library_folders() {
  std::vector<fs::path> folders;
  for (const fs::path& packages : package_folders())
    for (const char* inside : {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"}) folders.push_back(packages / inside);
  std::vector<fs::path> toolkits;
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"})
    if (const char* value = std::getenv(variable); value != nullptr && *value != '\0') toolkits.emplace_back(value);
  toolkits.insert(toolkits.end(), {"/usr/local/cuda", "/usr/local/cuda-13", "/usr/local/cuda-12", "/opt/cuda"});
  for (const fs::path& toolkit : toolkits)
    for (const char* inside : {"lib64", "lib"}) folders.push_back(toolkit / inside);
  return folders;
}

// The folder of the library that a function is from.
fs::path folder_of(void* function) {
  Dl_info info{};
  std::error_code ignored;
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return {};
  const fs::path path = fs::canonical(info.dli_fname, ignored);
  return ignored ? fs::path(info.dli_fname) : path;
}

// NVRTC opens libnvrtc-builtins by name when it first compiles, and does not look beside itself. A library that is
// loaded already is found by its name, so it is loaded from there first.
void load_builtins(const fs::path& folder) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("libnvrtc-builtins.so.")) dlopen(entry.path().c_str(), RTLD_NOW | RTLD_LOCAL);
  }
}

void* open_any(std::string& error) {
  const char* chosen = std::getenv("HEADRACE_NVRTC");
  if (chosen != nullptr && *chosen != '\0') {
    void* library = dlopen(chosen, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) error = fmt::format("HEADRACE_NVRTC={} cannot be opened: {}", chosen, dlerror());
    return library;
  }
  const std::vector<std::string> names = library_names();
  for (const std::string& name : names)
    if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  const std::vector<fs::path> folders = library_folders();
  for (const std::string& name : names)
    for (const fs::path& folder : folders)
      if (void* library = dlopen((folder / name).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  error = fmt::format("neither {} nor {} was found", names[0], names[1]);
  return nullptr;
}

Library open_library() {
  Library nvrtc;
  void* library = open_any(nvrtc.status.error);
  if (library == nullptr) return nvrtc;
  const auto look_up = [&]<typename Function>(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (function == nullptr) nvrtc.status.error = fmt::format("libnvrtc lacks {}", name);
  };
  Functions& call = nvrtc.call;
  look_up("nvrtcVersion", call.version);
  look_up("nvrtcGetErrorString", call.error_string);
  look_up("nvrtcCreateProgram", call.create);
  look_up("nvrtcDestroyProgram", call.destroy);
  look_up("nvrtcCompileProgram", call.compile);
  look_up("nvrtcGetCUBINSize", call.cubin_size);
  look_up("nvrtcGetCUBIN", call.cubin);
  look_up("nvrtcGetProgramLogSize", call.log_size);
  look_up("nvrtcGetProgramLog", call.log);
  if (!nvrtc.status.error.empty()) return nvrtc;

  const fs::path path = folder_of(reinterpret_cast<void*>(call.version));
  nvrtc.status.path = path.string();
  load_builtins(path.parent_path());
  int major = 0, minor = 0;
  if (call.version(&major, &minor) != nvrtc_success)
    nvrtc.status.error = fmt::format("{} does not tell its version", nvrtc.status.path);
  else if (major < 12)
    nvrtc.status.error = fmt::format("{} is of version {}.{}; 12.0 or newer is needed", path.string(), major, minor);
  else
    nvrtc.status.version = 1000 * major + 10 * minor;
  return nvrtc;
}

const Library& library() {
  static const Library nvrtc = open_library();
  return nvrtc;
}

void require(nvrtcResult result, const char* function) {
  if (result != nvrtc_success)
    throw Failure(HR_ERROR_RUNTIME, fmt::format("{} failed: {}", function, library().call.error_string(result)));
}

// A program in NVRTC, for the time of its compilation.
class Program {
 public:
  Program(const std::string& text, const std::string& name, const std::vector<std::string>& header_texts,
          const std::vector<std::string>& header_names) {
    std::vector<const char*> texts, names;
    for (const std::string& header : header_texts) texts.push_back(header.c_str());
    for (const std::string& header : header_names) names.push_back(header.c_str());
    require(library().call.create(&program_, text.c_str(), name.c_str(), static_cast<int>(texts.size()), texts.data(),
                                  names.data()),
            "nvrtcCreateProgram");
  }
  ~Program() { library().call.destroy(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  nvrtcResult compile(std::span<const std::string> options) {
    std::vector<const char*> texts;
    for (const std::string& option : options) texts.push_back(option.c_str());
    return library().call.compile(program_, static_cast<int>(texts.size()), texts.data());
  }
  std::string log() const {
    std::string text = read(library().call.log_size, library().call.log, "nvrtcGetProgramLog");
    while (!text.empty() && (text.back() == '\0' || text.back() == '\n')) text.pop_back();
    return text;
  }
  std::string cubin() const { return read(library().call.cubin_size, library().call.cubin, "nvrtcGetCUBIN"); }

 private:
  std::string read(nvrtcResult (*size)(nvrtcProgram, std::size_t*), nvrtcResult (*get)(nvrtcProgram, char*),
                   const char* function) const {
    std::size_t bytes = 0;
    require(size(program_, &bytes), function);
    std::string text(bytes, '\0');
    if (bytes > 0) require(get(program_, text.data()), function);
    return text;
  }

  nvrtcProgram program_ = nullptr;
};

}  // namespace

const NvrtcStatus& nvrtc_status() { return library().status; }

Compiled compile(std::string_view text, const std::string& name, std::span<const SourceFile> headers,
                 std::span<const std::string> options) {
  const NvrtcStatus& status = nvrtc_status();
  if (!status.error.empty()) throw Failure(HR_ERROR_RUNTIME, "NVRTC: " + status.error);
  std::vector<std::string> texts, names;
  for (const SourceFile& header : headers) {
    texts.emplace_back(header.text);
    names.emplace_back(header.name);
  }
  Program program{std::string(text), name, texts, names};
  const nvrtcResult result = program.compile(options);
  const std::string log = program.log();
  if (result != nvrtc_success)
    throw Failure(
        HR_ERROR_RUNTIME,
        fmt::format("NVRTC {} cannot compile {}: {}", version_text(status.version), name,
                    result == nvrtc_compilation_error ? log : library().call.error_string(result) + ("\n" + log)));
  return {program.cubin(), log};
}

}  // namespace headrace::cuda
