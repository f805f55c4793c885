// What main.cpp and the subcommands share: one function a subcommand, and the exit codes.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace CLI {
class App;
}

namespace headrace::tool {

enum ExitCode {
  exit_ok = 0,
  exit_check_failed = 1,  // a result is outside the accuracy contract
  exit_usage = 2,         // the command line is wrong
  exit_failure = 3        // a bad input file, an error of the library or of the system
};

// The command line does not make sense, though each flag by itself does.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Each adds its subcommand to app. When that is the one chosen, command becomes what it does; it
// returns the exit code and reports failures by exception.
using Command = std::function<int()>;
void add_attend(CLI::App& app, Command& command);
void add_bench(CLI::App& app, Command& command);
void add_demo(CLI::App& app, Command& command);
void add_explain(CLI::App& app, Command& command);
void add_info(CLI::App& app, Command& command);

}  // namespace headrace::tool
