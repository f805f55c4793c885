// Honest measurements: peak memory of a fresh process, times of alternating runs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace headrace::tool {

// Runs work in a child process of its own, so that its memory is that of the work alone, and returns what it
// returned. Throws std::runtime_error with the child's message if it failed or was killed. The caller must
// not have started threads: OpenMP does not survive in a child.
nlohmann::json in_child(const std::function<nlohmann::json()>& work);

// How far this process grew beyond the memory it held when the object was made. Memory counts where it is
// touched, as the kernel counts it.
class PeakMemory {
 public:
  PeakMemory();
  [[nodiscard]] std::int64_t growth_bytes() const;

 private:
  std::int64_t before_bytes_;
};

// Memory that can be taken without swapping: what the kernel calls available, or what a container leaves.
std::uint64_t available_memory();

double seconds_of(const std::function<void()>& work);
double median(std::vector<double> values);

// Runs the contestants in turn, `rounds` times, after a run of each that does not count, and returns the
// seconds of one run in every round. Short runs are repeated inside a round until it is long enough for the
// clock. No round begins after budget_seconds, but there is always one.
std::vector<std::vector<double>> race(const std::vector<std::function<void()>>& contestants, int rounds,
                                      double budget_seconds);

// A line on the terminal that says what is going on; nothing where stderr is no terminal.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(const std::string& text);
  void clear() noexcept;

 private:
  bool active_;
};

std::string format_bytes(double bytes);      // "16.0 GiB"
std::string format_seconds(double seconds);  // "1.23 ms"

}  // namespace headrace::tool
