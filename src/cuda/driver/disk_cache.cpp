#include "cuda/driver/disk_cache.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <limits>
#include <system_error>
#include <vector>

#include "cuda/driver/digest.hpp"

namespace headrace::cuda {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view entry_extension = ".cubin", unfinished_extension = ".tmp";

class File {
 public:
  File(const std::string& path, int flags) : descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0600)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_open() const { return descriptor_ >= 0; }

  // Sets the time of the last change, which tells when it was used last: many systems do not keep that of reading.
  void touch() const { static_cast<void>(futimens(descriptor_, nullptr)); }

  bool write_all(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(written));
    }
    // Without this a crash of the machine may leave a renamed file without its contents.
    return fsync(descriptor_) == 0;
  }

  std::optional<std::string> read_all() const {
    struct stat status {};
    if (fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
    std::string bytes(static_cast<std::size_t>(status.st_size), '\0');
    std::size_t have = 0;
    while (have < bytes.size()) {
      const ssize_t got = ::read(descriptor_, bytes.data() + have, bytes.size() - have);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return std::nullopt;
      have += static_cast<std::size_t>(got);
    }
    return bytes;
  }

 private:
  int descriptor_;
};

// What an entry begins with: it is read only if every word is as expected, so that a file that was cut, damaged,
// renamed or written by another version counts as absent.
std::string header_of(const std::string& key, std::string_view value) {
  return fmt::format("headrace kernel 1\nkey {}\nbytes {}\nsha256 {}\n\n", sha256(key), value.size(), sha256(value));
}

// 40 hexadecimal digits of a key's digest: other cubins in the folder are somebody else's.
constexpr std::size_t name_digits = 40;
bool is_entry(const fs::path& path) {
  const std::string stem = path.stem().string();
  return path.extension() == entry_extension && stem.size() == name_digits &&
         stem.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// What processes left that were killed while they wrote. A living one needs no hour.
void remove_unfinished(const fs::path& folder) {
  std::error_code ignored;
  const auto now = fs::file_time_type::clock::now();
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().extension() != unfinished_extension) continue;
    const auto written = entry.last_write_time(ignored);
    if (!ignored && now - written > std::chrono::hours(1)) fs::remove(entry.path(), ignored);
  }
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

std::string DiskCache::default_folder() {
  if (std::getenv("HEADRACE_CACHE_DIR") != nullptr) {
    const std::string chosen = variable("HEADRACE_CACHE_DIR");
    return chosen == "off" ? "" : chosen;
  }
  // The XDG Base Directory specification says to ignore relative paths.
  if (const std::string cache = variable("XDG_CACHE_HOME"); cache.starts_with('/')) return cache + "/headrace";
  if (const std::string home = variable("HOME"); home.starts_with('/')) return home + "/.cache/headrace";
  return "";
}

std::uintmax_t DiskCache::default_max_bytes() {
  constexpr std::uintmax_t mebibyte = 1 << 20;
  std::uintmax_t count = 512;
  const std::string text = variable("HEADRACE_CACHE_MAX_MB");
  std::uintmax_t wanted = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), wanted);
  if (error == std::errc() && end == text.data() + text.size()) count = wanted;
  return std::min(count, std::numeric_limits<std::uintmax_t>::max() / mebibyte) * mebibyte;
}

std::string DiskCache::path_of(const std::string& key) const {
  return fmt::format("{}/{}{}", folder_, sha256(key).substr(0, name_digits), entry_extension);
}

std::optional<std::string> DiskCache::read(const std::string& key) const noexcept try {
  if (folder_.empty()) return std::nullopt;
  const File file(path_of(key), O_RDONLY);
  if (!file.is_open()) return std::nullopt;
  std::optional<std::string> bytes = file.read_all();
  if (!bytes) return std::nullopt;
  const std::size_t end = bytes->find("\n\n");
  if (end == std::string::npos) return std::nullopt;
  std::string value = bytes->substr(end + 2);
  if (bytes->compare(0, end + 2, header_of(key, value)) != 0) return std::nullopt;
  file.touch();
  return value;
} catch (const std::exception&) {
  return std::nullopt;
}

void DiskCache::write(const std::string& key, std::string_view value) const noexcept try {
  if (folder_.empty()) return;
  const std::string entry = header_of(key, value) + std::string(value);
  if (entry.size() > max_bytes_) return;
  std::error_code ignored;
  fs::create_directories(folder_, ignored);
  remove_unfinished(folder_);
  static std::atomic<unsigned> count = 0;
  const std::string unfinished = fmt::format("{}/{}-{}-{}{}", folder_, sha256(key).substr(0, name_digits), getpid(),
                                             count++, unfinished_extension);
  // O_EXCL: a name that is taken, by a process of another container with the same number, is left alone.
  const File file(unfinished, O_WRONLY | O_CREAT | O_EXCL);
  if (!file.is_open()) return;
  if (file.write_all(entry) && std::rename(unfinished.c_str(), path_of(key).c_str()) == 0)
    evict(path_of(key));
  else
    unlink(unfinished.c_str());
} catch (const std::exception&) {
}

// Another process may do the same at the same time: an entry that is gone already is no error, one too many is compiled
// anew, and who reads an entry that is removed reads it to its end.
void DiskCache::evict(const std::string& newest) const {
  struct Entry {
    fs::file_time_type used;
    std::uintmax_t bytes;
    fs::path path;
  };
  std::vector<Entry> entries;
  std::uintmax_t all = 0;
  for (const fs::directory_entry& found : fs::directory_iterator(folder_)) {
    std::error_code gone;
    const Entry entry{found.last_write_time(gone), gone ? 0 : found.file_size(gone), found.path()};
    if (gone || !is_entry(found.path())) continue;
    all += entry.bytes;
    if (entry.path != fs::path(newest)) entries.push_back(entry);
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.used < b.used; });
  for (const Entry& entry : entries) {
    if (all <= max_bytes_) return;
    std::error_code kept;
    fs::remove(entry.path, kept);
    if (!kept) all -= entry.bytes;
  }
}

DiskCache::Usage DiskCache::usage() const noexcept try {
  Usage usage;
  std::error_code ignored;
  if (folder_.empty()) return usage;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_, ignored)) {
    const std::uintmax_t bytes = entry.file_size(ignored);
    if (!is_entry(entry.path()) || ignored) continue;
    ++usage.entries;
    usage.bytes += bytes;
  }
  return usage;
} catch (const std::exception&) {
  return {};
}

}  // namespace headrace::cuda
