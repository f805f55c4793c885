#include "sass.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <vector>

namespace headrace::cuda {
namespace {

namespace fs = std::filesystem;

struct Instruction {
  bool tensor = false, local = false;
};
struct Loop {
  std::size_t begin, end;  // instructions [begin, end)
};

bool contains(const Loop& outer, const Loop& inner) {
  return outer.begin <= inner.begin && inner.end <= outer.end && outer.end - outer.begin > inner.end - inner.begin;
}

}  // namespace

// A line is a label ".L_x_4:", or an instruction "/*05b0*/ @P1 BRA `(.L_x_4) ;", or something else. A branch to a label
// further up closes a loop.
SassReport count_instructions(std::string_view sass) {
  std::vector<Instruction> code;
  std::map<std::string_view, std::size_t> labels;
  std::vector<Loop> loops;
  while (!sass.empty()) {
    const std::size_t end = sass.find('\n');
    std::string_view line = sass.substr(0, end);
    sass.remove_prefix(end == std::string_view::npos ? sass.size() : end + 1);
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    if (line.starts_with(".L_")) labels[line.substr(0, line.find(':'))] = code.size();
    if (!line.starts_with("/*")) continue;
    const auto has = [&](std::string_view text) { return line.find(text) != std::string_view::npos; };
    code.push_back({has(" HGMMA") || has(" IGMMA") || has(" QGMMA"), has(" LDL") || has(" STL")});
    const std::size_t target = line.find("`(.L_");
    if (target == std::string_view::npos) continue;
    const auto label = labels.find(line.substr(target + 2, line.find(')', target) - target - 2));
    if (label != labels.end()) loops.push_back({label->second, code.size()});
  }

  const auto count = [&](const Loop& range, bool Instruction::*kind) {
    return static_cast<int>(std::count_if(code.begin() + static_cast<std::ptrdiff_t>(range.begin),
                                          code.begin() + static_cast<std::ptrdiff_t>(range.end),
                                          [&](const Instruction& instruction) { return instruction.*kind; }));
  };
  const Loop all = {0, code.size()};
  SassReport report{count(all, &Instruction::tensor), count(all, &Instruction::local), 0};
  std::erase_if(loops, [&](const Loop& loop) { return count(loop, &Instruction::tensor) == 0; });
  for (const Loop& loop : loops)
    if (std::none_of(loops.begin(), loops.end(), [&](const Loop& inner) { return contains(loop, inner); }))
      report.loop_local_accesses += count(loop, &Instruction::local);
  return report;
}

std::string nvdisasm_path() {
  const char* chosen = std::getenv("HEADRACE_NVDISASM");
  const std::string path = chosen == nullptr ? HEADRACE_TEST_NVDISASM : chosen;
  return access(path.c_str(), X_OK) == 0 ? path : "";
}

std::string disassemble(const std::string& cubin) {
  std::string file = (fs::temp_directory_path() / "headrace_sass_XXXXXX").string();
  const int descriptor = mkstemp(file.data());
  if (descriptor < 0) throw std::runtime_error("cannot write " + file);
  close(descriptor);
  std::ofstream(file, std::ios::binary) << cubin;
  const std::string command = fmt::format("'{}' -c '{}' 2>&1", nvdisasm_path(), file);
  FILE* output = popen(command.c_str(), "r");
  std::string text;
  std::array<char, 65536> part{};
  for (std::size_t bytes = 0; output != nullptr && (bytes = fread(part.data(), 1, part.size(), output)) > 0;)
    text.append(part.data(), bytes);
  const int status = output == nullptr ? -1 : pclose(output);
  fs::remove(file);
  if (status != 0) throw std::runtime_error(command + " failed: " + text.substr(0, 1000));
  return text;
}

}  // namespace headrace::cuda
