#include "cuda/driver/kernel_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "cuda/driver/digest.hpp"
#include "describe/problem.hpp"

namespace headrace::cuda {
namespace {

class KnownSources {
 public:
  void add(std::span<const SourceFile> files) {
    const std::lock_guard lock(mutex_);
    files_.insert(files_.end(), files.begin(), files.end());
  }
  std::optional<SourceFile> find(std::string_view name) const {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(files_.begin(), files_.end(), [&](const auto& file) { return file.name == name; });
    return found == files_.end() ? std::nullopt : std::optional(*found);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<SourceFile> files_{embedded_sources().begin(), embedded_sources().end()};
};

KnownSources& known_sources() {
  static KnownSources sources;
  return sources;
}

// The names in the lines #include "name". Whether a line is compiled is not asked: one file too many in a digest
// does no harm.
std::vector<std::string_view> includes_of(std::string_view text) {
  std::vector<std::string_view> names;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    if (!line.starts_with("#")) continue;
    const std::size_t directive = line.find("include"), open = line.find('"');
    if (directive == std::string_view::npos || open == std::string_view::npos) continue;
    names.push_back(line.substr(open + 1, line.find('"', open + 1) - open - 1));
  }
  return names;
}

}  // namespace

std::string name_of(const KernelSource& source) {
  std::string constants;
  for (const auto& [name, value] : source.constants)
    if (value != 0) constants += fmt::format("{}{}={}", constants.empty() ? "" : ", ", name, value);
  return constants.empty() ? source.entry : fmt::format("{}<{}>", source.entry, constants);
}

void add_sources(std::span<const SourceFile> files) { known_sources().add(files); }

std::vector<SourceFile> sources_of(const KernelSource& source) {
  const auto root = known_sources().find(source.file);
  if (!root)
    throw Failure(HR_ERROR_RUNTIME, fmt::format("kernel {}: {} is not part of the library", source.entry, source.file));
  std::vector<SourceFile> files = {*root};
  for (std::size_t i = 0; i < files.size(); ++i)
    for (const std::string_view name : includes_of(files[i].text)) {
      const auto file = known_sources().find(name);
      if (!file)
        throw Failure(HR_ERROR_RUNTIME, fmt::format("kernel {}: {}, which {} includes, is not part of the library",
                                                    source.entry, name, files[i].name));
      if (std::none_of(files.begin(), files.end(), [&](const SourceFile& known) { return known.name == name; }))
        files.push_back(*file);
    }
  return files;
}

std::vector<std::string> options_of(const KernelSource& source, const std::string& architecture) {
  // Functions without an execution space, those of the host's headers, are device functions.
  std::vector<std::string> options = {"-std=c++20", "-arch=" + architecture, "-default-device",
                                      "-DHEADRACE_HOST_DEVICE=__host__ __device__"};
  for (const auto& [name, value] : source.constants)
    options.push_back(value < 0 ? fmt::format("-D{}=({})", name, value) : fmt::format("-D{}={}", name, value));
  return options;
}

std::string digest_of(const KernelSource& source, const std::string& architecture) {
  std::string all = fmt::format("{}\n{}\n", source.entry, source.file);
  for (const std::string& option : options_of(source, architecture)) all += option + '\n';
  for (const SourceFile& file : sources_of(source))
    all += fmt::format("{} {}\n{}\n", file.name, file.text.size(), file.text);
  return sha256(all);
}

Compiled compile(const KernelSource& source, const std::string& architecture, bool verbose) {
  const std::vector<SourceFile> files = sources_of(source);
  std::vector<std::string> options = options_of(source, architecture);
  if (verbose) options.emplace_back("--ptxas-options=-v");
  return compile(files.front().text, source.file, std::span(files).subspan(1), options);
}

}  // namespace headrace::cuda
