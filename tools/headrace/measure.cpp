#include "measure.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "fmt/format.h"

namespace headrace::tool {
namespace {

using Json = nlohmann::json;

// A line of a /proc file in kB, e.g. "VmRSS:", in bytes; 0 where there is none.
std::int64_t proc_bytes(const char* file, const std::string& name) {
  std::ifstream lines(file);
  std::string word;
  while (lines >> word) {
    std::int64_t value = 0;
    if (word == name && lines >> value) return value * 1024;
  }
  return 0;
}

std::int64_t number_in(const char* file, std::int64_t otherwise) {
  std::int64_t value = 0;
  return std::ifstream(file) >> value ? value : otherwise;
}

std::string read_all(int descriptor) {
  std::string text;
  char buffer[4096];
  ssize_t count = 0;
  while ((count = read(descriptor, buffer, sizeof buffer)) > 0) text.append(buffer, static_cast<std::size_t>(count));
  return text;
}

void write_all(int descriptor, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = write(descriptor, text.data() + done, text.size() - done);
    if (count <= 0) return;  // the parent sees an incomplete answer
    done += static_cast<std::size_t>(count);
  }
}

}  // namespace

Json in_child(const std::function<Json()>& work) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error(fmt::format("pipe: {}", std::strerror(errno)));
  std::fflush(nullptr);  // else the child would print it again
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error(fmt::format("fork: {}", std::strerror(errno)));
  if (child == 0) {
    close(ends[0]);
    Json answer;
    try {
      answer["result"] = work();
    } catch (const std::bad_alloc&) {
      answer["error"] = "there is not enough memory";
    } catch (const std::exception& error) {
      answer["error"] = error.what();
    }
    write_all(ends[1], answer.dump(-1, ' ', false, Json::error_handler_t::replace));
    _exit(0);  // no destructors: threads of a BLAS may still run
  }
  close(ends[1]);
  const std::string text = read_all(ends[0]);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status))
    throw std::runtime_error(fmt::format("a measurement was killed by signal {} ({}){}", WTERMSIG(status),
                                         strsignal(WTERMSIG(status)),
                                         WTERMSIG(status) == SIGKILL ? "; perhaps memory ran out" : ""));
  const Json answer = Json::parse(text, nullptr, false);
  if (answer.is_discarded()) throw std::runtime_error("a measurement ended without a result");
  if (answer.contains("error")) throw std::runtime_error(answer["error"].get<std::string>());
  return answer["result"];
}

PeakMemory::PeakMemory() {
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak so far is forgotten
  before_bytes_ = proc_bytes("/proc/self/status", "VmRSS:");
}

std::int64_t PeakMemory::growth_bytes() const {
  return std::max<std::int64_t>(0, proc_bytes("/proc/self/status", "VmHWM:") - before_bytes_);
}

std::uint64_t available_memory() {
  std::int64_t available = proc_bytes("/proc/meminfo", "MemAvailable:");
  const std::int64_t limit = number_in("/sys/fs/cgroup/memory.max", available);
  const std::int64_t used = number_in("/sys/fs/cgroup/memory.current", 0);
  available = std::min(available, limit < available ? limit - used : available);
  return static_cast<std::uint64_t>(std::max<std::int64_t>(0, available));
}

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

std::vector<std::vector<double>> race(const std::vector<std::function<void()>>& contestants, int rounds,
                                      double budget_seconds) {
  constexpr double shortest_round = 0.02, slow = 1.0;
  const std::size_t count = contestants.size();
  std::vector<int> runs(count);
  for (std::size_t c = 0; c < count; ++c) {
    double once = seconds_of(contestants[c]);
    if (once < slow) once = seconds_of(contestants[c]);  // warm now
    runs[c] = std::clamp(static_cast<int>(shortest_round / std::max(once, 1e-7)), 1, 10'000);
  }
  std::vector<std::vector<double>> times(count);
  double spent = 0.0;
  for (int round = 0; round < rounds && (round == 0 || spent < budget_seconds); ++round) {
    for (std::size_t c = 0; c < count; ++c) {
      const double total = seconds_of([&] {
        for (int run = 0; run < runs[c]; ++run) contestants[c]();
      });
      times[c].push_back(total / runs[c]);
      spent += total;
    }
  }
  return times;
}

Progress::Progress() : active_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { clear(); }

void Progress::show(const std::string& text) {
  clear();
  if (active_) std::fputs(text.c_str(), stderr);
}

void Progress::clear() noexcept {
  if (active_) std::fputs("\r\x1b[K", stderr);
}

std::string format_bytes(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024.0 && unit + 1 < std::size(units)) bytes /= 1024.0, ++unit;
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 1, units[unit]);
}

std::string format_seconds(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1.0) return fmt::format("{:.{}f} ms", seconds * 1e3, seconds < 0.1 ? 2 : 0);
  return fmt::format("{:.2f} s", seconds);
}

}  // namespace headrace::tool
