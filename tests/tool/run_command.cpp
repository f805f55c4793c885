#include "run_command.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace headrace::tool {
namespace {

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) {
    if (c == '\'') {
      result += "'\\''";
    } else {
      result += c;
    }
  }
  result += "'";
  return result;
}

std::string contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

}  // namespace

void CommandTest::SetUp() {
  const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
  directory_ = std::filesystem::path(::testing::TempDir()) / ("headrace_" + std::to_string(getpid()) + name);
  std::filesystem::create_directories(directory_);
}

void CommandTest::TearDown() { std::filesystem::remove_all(directory_); }

CommandResult CommandTest::run(const std::vector<std::string>& arguments) const {
  std::ostringstream line;
  line << HEADRACE_COMMAND;  // the emulator, where there is one, and the binary
  for (const std::string& argument : arguments) line << ' ' << quoted(argument);
  line << " >" << quoted(path("stdout")) << " 2>" << quoted(path("stderr")) << " </dev/null";
  const int status = std::system(line.str().c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents(path("stdout")), contents(path("stderr"))};
}

}  // namespace headrace::tool
