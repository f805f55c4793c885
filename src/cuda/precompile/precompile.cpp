#include "cuda/precompile/precompile.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/driver/nvrtc.hpp"
#include "cuda/driver/precompiled.hpp"
#include "cuda/standard_set.hpp"

namespace headrace::cuda {
namespace {

namespace fs = std::filesystem;

std::optional<std::string> read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Under another name first: a build that is interrupted leaves no half files.
void write_file(const fs::path& path, const std::string& bytes) {
  const fs::path unfinished = path.string() + ".tmp";
  std::ofstream file(unfinished, std::ios::binary);
  file << bytes;
  file.close();
  if (!file) throw std::runtime_error("cannot write " + unfinished.string());
  fs::rename(unfinished, path);
}

std::string compile_checked(const KernelSource& source) {
  const Compiled compiled = compile(source, std::string(standard_architecture));
  // ptxas C7510 to C7520: every wgmma waits for the one before, which costs most of the kernel's speed.
  if (compiled.log.find("are serialized") != std::string::npos)
    throw std::runtime_error("ptxas serialised the tensor core instructions of a kernel of the standard set:\n" +
                             compiled.log);
  if (!compiled.log.empty()) fmt::print(stderr, "{}:\n{}\n", name_of(source), compiled.log);
  return compiled.cubin;
}

class Precompiler {
 public:
  Precompiler(std::span<const KernelSource> sources, fs::path store) : store_(std::move(store)), sources_(sources) {
    fs::create_directories(store_);
  }

  // Any number of threads: takes the next kernel until there are no more, or one has failed.
  void work() noexcept {
    for (std::size_t i = next_++; i < sources_.size(); i = next_++) {
      try {
        add(sources_[i]);
      } catch (const std::exception& error) {
        fmt::print(stderr, "headrace_precompile: {}: {}\n", name_of(sources_[i]), error.what());
        failed_ = true;
      }
    }
  }

  std::size_t compiled() const { return compiled_; }

  // The pack, and a store without what no kernel of the set is any more.
  std::string finish() const {
    if (failed_) throw std::runtime_error("not every kernel was compiled");
    for (const fs::directory_entry& entry : fs::directory_iterator(store_))
      if (!cubins_.contains(entry.path().stem().string())) fs::remove(entry.path());
    return write_pack(cubins_);
  }

 private:
  void add(const KernelSource& source) {
    const std::string digest = digest_of(source, std::string(standard_architecture));
    // Another NVRTC makes another cubin.
    const fs::path path = store_ / fmt::format("{}.{}", digest, nvrtc_status().version);
    std::optional<std::string> cubin = read_file(path);
    if (!cubin) {
      const auto start = std::chrono::steady_clock::now();
      cubin = compile_checked(source);
      ++compiled_;
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      fmt::print("{}: {} bytes, {:.1f} s\n", name_of(source), cubin->size(), seconds.count());
      write_file(path, *cubin);
    }
    const std::lock_guard lock(mutex_);
    if (!cubins_.emplace(digest, std::move(*cubin)).second) throw std::runtime_error("is in the set twice");
  }

  fs::path store_;
  std::span<const KernelSource> sources_;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<std::size_t> compiled_ = 0;
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;
  std::map<std::string, std::string> cubins_;
};

}  // namespace

std::size_t precompile(std::span<const KernelSource> set, const std::string& store, const std::string& pack_path) {
  Precompiler precompiler(set, store);
  std::vector<std::thread> threads(std::max(1u, std::thread::hardware_concurrency()));
  for (std::thread& thread : threads) thread = std::thread([&] { precompiler.work(); });
  for (std::thread& thread : threads) thread.join();
  const std::string pack = precompiler.finish();
  // An unchanged pack keeps its time stamp, so that the library is not linked again.
  if (read_file(pack_path) != pack) write_file(pack_path, pack);
  return precompiler.compiled();
}

}  // namespace headrace::cuda
