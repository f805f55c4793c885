// headrace: the command line. Results go to stdout, errors to stderr as "headrace: error: ...".
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "CLI/CLI.hpp"
#include "command.hpp"
#include "fmt/format.h"
#include "headrace/headrace.hpp"

namespace {

using namespace headrace::tool;

int fail(ExitCode code, const std::string& message) {
  std::fflush(stdout);
  fmt::print(stderr, "headrace: error: {}\n", message);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Exact attention that streams over the keys: the N x N score matrix never exists.", "headrace");
  app.set_version_flag("--version", fmt::format("headrace {}", headrace::version()));
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.footer(
      "Exit codes: 0 all is well; 1 a result is outside the accuracy contract; 2 the command line\n"
      "is wrong; 3 a bad input file, or an error of the library or the system.\n\n"
      "`headrace COMMAND --help` shows the options of a command and examples.");

  Command command;
  add_info(app, command);
  add_attend(app, command);
  add_bench(app, command);
  add_explain(app, command);
  add_demo(app, command);

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    // CLI11 would only say that a subcommand is missing.
    const bool unknown = app.get_subcommands().empty() && !app.remaining().empty();
    const std::string reason = unknown ? fmt::format("{} is no command", app.remaining().front()) : error.what();
    return fail(exit_usage, reason + "\nRun headrace --help, or headrace COMMAND --help, for what is allowed.");
  }

  try {
    const int code = command();
    if (std::fflush(stdout) != 0) return fail(exit_failure, "standard output cannot be written");
    return code;
  } catch (const UsageError& error) {
    return fail(exit_usage, error.what());
  } catch (const std::bad_alloc&) {
    return fail(exit_failure, "there is not enough memory");
  } catch (const std::exception& error) {
    return fail(exit_failure, error.what());
  }
}
