// Runs the built `headrace` as a user would, in a directory of the test's own.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

namespace headrace::tool {

struct CommandResult {
  int code = -1;
  std::string out, err;
};

class CommandTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  [[nodiscard]] std::string path(const std::string& name) const { return directory_ / name; }
  // "attend", "file", "--check": arguments are passed as they are, whatever they contain.
  [[nodiscard]] CommandResult run(const std::vector<std::string>& arguments) const;

 private:
  std::filesystem::path directory_;
};

}  // namespace headrace::tool
