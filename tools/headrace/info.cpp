// headrace info: what this machine offers.
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "command.hpp"
#include "fmt/format.h"
#include "headrace/headrace.hpp"
#include "nlohmann/json.hpp"

namespace headrace::tool {
namespace {

using Json = nlohmann::ordered_json;

std::string value_text(const Json& value) {
  if (value.is_null()) return "none";
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return value.dump();
  std::string text;
  for (const Json& item : value) {
    if (!text.empty()) text += ", ";
    text += value_text(item);
  }
  return text.empty() ? "none" : text;
}

// One line a value; what lies inside an object is named after it: "simd chosen".
void print_values(const std::string& prefix, const Json& object) {
  for (const auto& [key, value] : object.items()) {
    const std::string name = prefix.empty() ? key : fmt::format("{} {}", prefix, key);
    if (value.is_object())
      print_values(name, value);
    else
      fmt::print("{:<20} {}\n", name, value_text(value));
  }
}

}  // namespace

void add_info(CLI::App& app, Command& command) {
  CLI::App* info = app.add_subcommand("info", "Show version, SIMD targets, threads and GPU of this machine");
  info->footer("Examples:\n  headrace info\n  headrace info --json");
  auto as_json = std::make_shared<bool>(false);
  info->add_flag("--json", *as_json, "Print a JSON object");
  info->callback([&command, as_json] {
    command = [as_json] {
      const Json values = Json::parse(headrace::info());
      if (*as_json)
        fmt::print("{}\n", values.dump(2));
      else
        print_values("", values);
      return exit_ok;
    };
  });
}

}  // namespace headrace::tool
