// The options of an attention call as command-line flags; attend, explain and the others share them.
#pragma once

#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>

#include "CLI/CLI.hpp"
#include "fmt/format.h"
#include "headrace/headrace.hpp"

namespace headrace::tool {

// An option that takes one integer. CLI11 by itself lets numbers that do not fit saturate or wrap.
template <typename T>
CLI::Option* add_integer(CLI::App& app, const std::string& name, T& value, const std::string& help) {
  using Integer = typename decltype([] {
    if constexpr (requires { typename T::value_type; })
      return std::type_identity<typename T::value_type>();
    else
      return std::type_identity<T>();
  }())::type;
  const auto check = [](const std::string& text) -> std::string {
    Integer parsed{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
    if (error == std::errc() && end == text.data() + text.size()) return "";
    return fmt::format("{} is no integer from {} to {}", text, std::numeric_limits<Integer>::min(),
                       std::numeric_limits<Integer>::max());
  };
  return app.add_option(name, value, help)->type_name("N")->check(CLI::Validator(check, ""));
}

struct AttentionFlags {
  std::string causal = "none", backend = "auto";
  std::optional<double> scale;
  std::optional<std::int64_t> window_left, window_right;
  double softcap = 0.0, dropout_p = 0.0;
  std::uint64_t seed = 0;
  std::int64_t block_q = 0, block_k = 0;
  bool deterministic = false, batch_invariant = false;
  int threads = 0;

  void add_to(CLI::App& app);
  // An attention with these options and no tensors. Ranges are the library's business.
  [[nodiscard]] Attention attention() const;
  // What differs from the defaults, for people: "causal bottom_right, softcap 30"; "" if nothing does.
  [[nodiscard]] std::string summary() const;
};

}  // namespace headrace::tool
