// headrace info: what this machine offers.
#include <cstdint>
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "command.hpp"
#include "fmt/format.h"
#include "headrace/headrace.hpp"
#include "nlohmann/json.hpp"

namespace headrace::tool {
namespace {

using OrderedJson = nlohmann::ordered_json;

// 143771 MiB rather than 150754820096.
std::string bytes_text(std::uint64_t bytes) {
  constexpr std::uint64_t kib = 1024, mib = kib * kib;
  if (bytes < 10 * kib) return fmt::format("{} bytes", bytes);
  return bytes < 10 * mib ? fmt::format("{} KiB", bytes / kib) : fmt::format("{} MiB", bytes / mib);
}

std::string value_text(const std::string& key, const OrderedJson& value) {
  if (value.is_null()) return "none";
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_unsigned() && key.ends_with("bytes")) return bytes_text(value.get<std::uint64_t>());
  return value.dump();
}

std::string list_text(const OrderedJson& list) {
  std::string text;
  for (const OrderedJson& item : list) {
    if (!text.empty()) text += ", ";
    text += value_text("", item);
  }
  return text.empty() ? "none" : text;
}

// One line a value; what lies inside an object is named after it: "simd chosen". Objects of a list are numbered.
void print_values(const std::string& prefix, const OrderedJson& object) {
  for (const auto& [key, value] : object.items()) {
    const std::string name = prefix.empty() ? key : fmt::format("{} {}", prefix, key);
    const bool nested = value.is_object() || (value.is_array() && !value.empty() && value[0].is_object());
    if (nested)
      print_values(name, value);
    else
      fmt::print("{:<32} {}\n", name, value.is_array() ? list_text(value) : value_text(key, value));
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
      const OrderedJson values = OrderedJson::parse(headrace::info());
      if (*as_json)
        fmt::print("{}\n", values.dump(2));
      else
        print_values("", values);
      return exit_ok;
    };
  });
}

}  // namespace headrace::tool
