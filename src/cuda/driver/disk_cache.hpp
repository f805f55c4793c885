// Compiled kernels on disk, so that a process need not compile what an earlier one did. It only ever saves time:
// whatever goes wrong with it, a read finds nothing and a write does nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace headrace::cuda {

class DiskCache {
 public:
  // A folder, which need not exist yet; empty: nothing is kept. Entries that were used longest ago make room where all
  // of them would be larger than max_bytes.
  explicit DiskCache(std::string folder, std::uintmax_t max_bytes = default_max_bytes())
      : folder_(std::move(folder)), max_bytes_(max_bytes) {}

  // $HEADRACE_CACHE_DIR, nothing if it is empty or "off"; else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace.
  static std::string default_folder();

  // $HEADRACE_CACHE_MAX_MB mebibytes; 512 if it is not set or no number.
  static std::uintmax_t default_max_bytes();

  // The entry of this key, if it is there and whole. It counts as used now.
  std::optional<std::string> read(const std::string& key) const noexcept;

  // Replaces the entry at once for every process, or not at all: it is written beside and renamed. Any number of
  // threads and processes may write the same key, and be killed meanwhile. Then evicts what is too much; an entry that
  // is too large by itself is not written.
  void write(const std::string& key, std::string_view value) const noexcept;

  struct Usage {
    std::size_t entries = 0;
    std::uintmax_t bytes = 0;
  };
  Usage usage() const noexcept;

  const std::string& folder() const { return folder_; }
  std::uintmax_t max_bytes() const { return max_bytes_; }

 private:
  std::string path_of(const std::string& key) const;
  void evict(const std::string& newest) const;

  std::string folder_;
  std::uintmax_t max_bytes_;
};

}  // namespace headrace::cuda
