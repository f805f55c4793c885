// The disk cache against what disks, users and other processes do to it.
#include "cuda/driver/disk_cache.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

namespace headrace::cuda {
namespace {

namespace fs = std::filesystem;

class DiskCacheTest : public testing::Test {
 protected:
  DiskCacheTest() {
    std::string pattern = (fs::temp_directory_path() / "headrace_cache_XXXXXX").string();
    root_ = mkdtemp(pattern.data());
  }
  ~DiskCacheTest() override {
    fs::permissions(root_, fs::perms::owner_all);
    fs::remove_all(root_);
  }

  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root_))
      if (entry.is_regular_file()) found.push_back(entry.path());
    return found;
  }

  fs::path root_;
};

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void overwrite(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

// A value that says which key it belongs to, long enough to be written in more than one page.
std::string value_of(const std::string& key, int version = 0) {
  std::string value;
  for (int i = 0; i < 3000; ++i) value += key + ' ' + std::to_string(version) + '\0';
  return value;
}

// Runs it in another process; its exit status. It must not return through GoogleTest.
int in_process(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(DiskCacheTest, ReturnsWhatWasWritten) {
  const DiskCache cache((root_ / "not" / "there" / "yet").string());
  EXPECT_EQ(cache.read("a"), std::nullopt);
  EXPECT_EQ(cache.usage().entries, 0u);
  cache.write("a", value_of("a"));
  cache.write("b", "");
  EXPECT_EQ(cache.read("a"), value_of("a"));
  EXPECT_EQ(cache.read("b"), "");
  EXPECT_EQ(cache.read("c"), std::nullopt);
  cache.write("a", value_of("a", 1));
  EXPECT_EQ(cache.read("a"), value_of("a", 1));
  EXPECT_EQ(cache.usage().entries, 2u);
  EXPECT_GT(cache.usage().bytes, value_of("a", 1).size());
  EXPECT_EQ(files().size(), 2u) << "something was left behind";
}

TEST_F(DiskCacheTest, WithoutAFolderKeepsNothing) {
  const DiskCache cache("");
  cache.write("a", "value");
  EXPECT_EQ(cache.read("a"), std::nullopt);
  EXPECT_EQ(cache.usage().entries, 0u);
}

TEST_F(DiskCacheTest, DamagedEntriesAreAbsentAndReplaced) {
  const DiskCache cache(root_.string());
  cache.write("a", value_of("a"));
  const fs::path path = files().at(0);
  const std::string whole = contents(path);
  const auto expect_absent = [&](const std::string& bytes, const std::string& what) {
    overwrite(path, bytes);
    EXPECT_EQ(cache.read("a"), std::nullopt) << what;
    cache.write("a", value_of("a"));
    EXPECT_EQ(cache.read("a"), value_of("a")) << what;
  };
  for (std::size_t bytes = 0; bytes < whole.size(); bytes += bytes < 300 ? 7 : 997)
    expect_absent(whole.substr(0, bytes), "cut to " + std::to_string(bytes));
  for (std::size_t at = 0; at < whole.size(); at += at < 300 ? 7 : 997) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 4);
    expect_absent(changed, "bit of byte " + std::to_string(at));
  }
  expect_absent(whole + "x", "longer");
  expect_absent(std::string(whole.size(), '\0'), "zeros, as after a crash of the machine");
}

TEST_F(DiskCacheTest, AnEntryUnderAnotherNameIsAbsent) {
  const DiskCache cache(root_.string());
  cache.write("a", "of a");
  const fs::path path_a = files().at(0);
  const std::string entry_a = contents(path_a);
  fs::remove(path_a);
  cache.write("b", "of b");
  overwrite(files().at(0), entry_a);
  EXPECT_EQ(cache.read("b"), std::nullopt);
}

TEST_F(DiskCacheTest, AFileInPlaceOfTheFolderIsNoError) {
  overwrite(root_ / "file", "mine");
  for (const char* folder : {"file", "file/inside"}) {
    const DiskCache cache((root_ / folder).string());
    cache.write("a", "value");
    EXPECT_EQ(cache.read("a"), std::nullopt);
    EXPECT_EQ(cache.usage().entries, 0u);
  }
  EXPECT_EQ(contents(root_ / "file"), "mine");
}

TEST_F(DiskCacheTest, AFolderInPlaceOfAnEntryIsNoError) {
  const DiskCache cache(root_.string());
  cache.write("a", "value");
  const fs::path path = files().at(0);
  fs::remove(path);
  fs::create_directories(path / "inside");
  EXPECT_EQ(cache.read("a"), std::nullopt);
  cache.write("a", "value");
  EXPECT_EQ(cache.read("a"), std::nullopt);
  EXPECT_TRUE(files().empty()) << "something was left behind";
}

TEST_F(DiskCacheTest, AReadOnlyFolderIsReadAndNotWritten) {
  const DiskCache cache(root_.string());
  cache.write("a", "value");
  fs::permissions(root_, fs::perms(0555));
  fs::permissions(files().at(0), fs::perms(0444));
  // Root may write anywhere, so another user tries.
  const int status = in_process([&] {
    if (geteuid() == 0 && setuid(65534) != 0) return 77;
    cache.write("b", "value");
    return (cache.read("a") == "value" ? 0 : 1) + (cache.read("b") == std::nullopt ? 0 : 2);
  });
  if (status == 77) GTEST_SKIP() << "cannot become another user";
  EXPECT_EQ(status, 0);
  EXPECT_EQ(files().size(), 1u);
}

// A full disk and a file that grows too large fail in the same call, write(2), in the same way.
TEST_F(DiskCacheTest, AFullDiskIsNoErrorAndLeavesNothing) {
  const DiskCache cache(root_.string());
  cache.write("a", value_of("a"));
  const int status = in_process([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {1000, 1000};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 77;
    cache.write("b", value_of("b"));
    cache.write("a", value_of("a", 1));
    return (cache.read("b") == std::nullopt ? 0 : 1) + (cache.read("a") == value_of("a") ? 0 : 2);
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(files().size(), 1u) << "something was left behind";
}

TEST_F(DiskCacheTest, NoDescriptorsIsNoError) {
  const DiskCache cache(root_.string());
  cache.write("a", "value");
  const int status = in_process([&] {
    const rlimit limit = {3, 3};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 77;
    cache.write("b", "value");
    return (cache.read("a") == std::nullopt ? 0 : 1) + (cache.usage().entries == 0 ? 0 : 2);
  });
  EXPECT_EQ(status, 0);
}

TEST_F(DiskCacheTest, LeftoversOfKilledProcessesAreRemoved) {
  overwrite(root_ / "old-1-0.tmp", "half");
  overwrite(root_ / "new-2-0.tmp", "half");
  overwrite(root_ / "something else", "kept");
  fs::last_write_time(root_ / "old-1-0.tmp", fs::file_time_type::clock::now() - std::chrono::hours(2));
  DiskCache(root_.string()).write("a", "value");
  EXPECT_FALSE(fs::exists(root_ / "old-1-0.tmp"));
  EXPECT_TRUE(fs::exists(root_ / "new-2-0.tmp")) << "its process may still write it";
  EXPECT_TRUE(fs::exists(root_ / "something else"));
}

// Ten entries of the same size.
class DiskCacheOfTen : public DiskCacheTest {
 protected:
  static constexpr std::size_t value_bytes = 10000, header_bytes = 200;
  DiskCacheOfTen() : cache_(root_.string(), 10 * (value_bytes + header_bytes)) {
    for (int n = 0; n < 10; ++n) write(n);
  }
  static std::string key(int n) { return "key " + std::to_string(n); }
  // Files get their times from a clock that may tick slowly: each is made older than the one written after it.
  void write(int n) {
    for (const fs::path& path : files())
      fs::last_write_time(path, fs::last_write_time(path) - std::chrono::seconds(10));
    cache_.write(key(n), std::string(value_bytes, static_cast<char>('a' + n)));
  }
  // Without counting as used.
  bool has(int n) const {
    for (const fs::path& path : files())
      if (contents(path).find("\n\n" + std::string(value_bytes, static_cast<char>('a' + n))) != std::string::npos)
        return true;
    return false;
  }
  DiskCache cache_;
};

TEST_F(DiskCacheOfTen, TheOldestMakesRoom) {
  EXPECT_EQ(cache_.usage().entries, 10u);
  write(10);
  EXPECT_FALSE(has(0));
  for (int n = 1; n <= 10; ++n) EXPECT_TRUE(has(n)) << n;
  EXPECT_LE(cache_.usage().bytes, cache_.max_bytes());
}

TEST_F(DiskCacheOfTen, WhatIsReadIsNotOld) {
  EXPECT_NE(cache_.read(key(0)), std::nullopt);
  EXPECT_EQ(cache_.read(key(20)), std::nullopt);
  write(10);
  write(11);
  EXPECT_TRUE(has(0));
  EXPECT_FALSE(has(1));
  EXPECT_FALSE(has(2));
  EXPECT_TRUE(has(3));
}

TEST_F(DiskCacheOfTen, AReplacedEntryCountsOnce) {
  write(0);
  for (int n = 0; n < 10; ++n) EXPECT_TRUE(has(n)) << n;
}

// A smaller bound, of another process, holds at its next write.
TEST_F(DiskCacheOfTen, SeveralMakeRoom) {
  for (const char* name : {"something else", "other.cubin"}) overwrite(root_ / name, std::string(1 << 20, 'x'));
  DiskCache(root_.string(), 3 * (value_bytes + header_bytes)).write("small", "value");
  EXPECT_TRUE(fs::exists(root_ / "something else"));
  EXPECT_TRUE(fs::exists(root_ / "other.cubin"));
  EXPECT_EQ(cache_.read("small"), "value");
  EXPECT_FALSE(has(7));
  EXPECT_TRUE(has(8));
  EXPECT_TRUE(has(9));
}

TEST_F(DiskCacheOfTen, WhatIsTooLargeByItselfIsNotWritten) {
  cache_.write("large", std::string(cache_.max_bytes(), 'x'));
  EXPECT_EQ(cache_.read("large"), std::nullopt);
  EXPECT_EQ(cache_.usage().entries, 10u);
  DiskCache(root_.string(), 0).write("any", "value");
  EXPECT_EQ(cache_.read("any"), std::nullopt);
  EXPECT_EQ(cache_.usage().entries, 10u);
}

// A folder in place of the oldest entry cannot be removed: the next ones go.
TEST_F(DiskCacheOfTen, WhatCannotBeRemovedStays) {
  fs::path oldest = files().at(0);
  for (const fs::path& path : files())
    if (fs::last_write_time(path) < fs::last_write_time(oldest)) oldest = path;
  fs::remove(oldest);
  fs::create_directories(oldest / "inside");
  write(10);
  write(11);
  EXPECT_TRUE(fs::exists(oldest / "inside"));
  EXPECT_FALSE(has(1));
  EXPECT_TRUE(has(2));
  EXPECT_TRUE(has(11));
}

// Four processes write far more than fits; nobody sees a wrong value, and in the end the bound holds.
TEST_F(DiskCacheOfTen, HoldsItsBoundAmongProcesses) {
  std::vector<pid_t> children;
  for (int process = 0; process < 4; ++process) {
    const pid_t child = fork();
    if (child == 0) {
      for (int n = 0; n < 100; ++n) {
        const std::string name = key(n % 7 + 30 * process), value(value_bytes, static_cast<char>('a' + n % 7));
        cache_.write(name, value);
        const auto read = cache_.read(name);
        if (read && *read != value) _exit(1);
      }
      _exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  write(10);
  EXPECT_TRUE(has(10));
  EXPECT_LE(cache_.usage().bytes, cache_.max_bytes());
  EXPECT_EQ(files().size(), cache_.usage().entries) << "something was left behind";
}

// Eight processes write and read the same few keys; half of them are killed at some moment and started again. Nobody
// ever sees anything but a whole value of the right key.
TEST_F(DiskCacheTest, SurvivesConcurrentAndKilledProcesses) {
  constexpr int processes = 8, rounds = 200, keys = 3;
  const auto work = [&](int seed) {
    const DiskCache cache(root_.string());
    for (int i = 0; i < rounds; ++i) {
      const std::string key = "key " + std::to_string((seed + i) % keys);
      if (i % 3 == 0) cache.write(key, value_of(key, i % 5));
      const auto value = cache.read(key);
      if (!value) continue;
      bool whole = false;
      for (int version = 0; version < 5; ++version) whole = whole || *value == value_of(key, version);
      if (!whole) return 1;
    }
    return 0;
  };
  std::vector<pid_t> children;
  for (int i = 0; i < processes; ++i) {
    const pid_t child = fork();
    if (child == 0) _exit(work(i));
    children.push_back(child);
  }
  for (int i = 0; i < 40; ++i) {
    pid_t& victim = children[static_cast<std::size_t>(i % (processes / 2))];
    std::this_thread::sleep_for(std::chrono::milliseconds(1 + i % 3));
    kill(victim, SIGKILL);
    int status = 0;
    waitpid(victim, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) << status;
    victim = fork();
    if (victim == 0) _exit(work(i));
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  const DiskCache cache(root_.string());
  for (int i = 0; i < keys; ++i) EXPECT_NE(cache.read("key " + std::to_string(i)), std::nullopt);
  EXPECT_EQ(cache.usage().entries, static_cast<std::size_t>(keys));
}

class Environment {  // restores a variable
 public:
  explicit Environment(const char* name) : name_(name) {
    if (const char* value = std::getenv(name)) value_ = value, set_ = true;
  }
  ~Environment() { set_ ? setenv(name_, value_.c_str(), 1) : unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
  std::string value_;
  bool set_ = false;
};

TEST(DiskCacheFolder, FollowsTheEnvironment) {
  const Environment own("HEADRACE_CACHE_DIR"), xdg("XDG_CACHE_HOME"), home("HOME");
  setenv("HOME", "/nowhere", 1);
  setenv("XDG_CACHE_HOME", "/xdg", 1);
  setenv("HEADRACE_CACHE_DIR", "/chosen", 1);
  EXPECT_EQ(DiskCache::default_folder(), "/chosen");
  setenv("HEADRACE_CACHE_DIR", "off", 1);
  EXPECT_EQ(DiskCache::default_folder(), "");
  setenv("HEADRACE_CACHE_DIR", "", 1);
  EXPECT_EQ(DiskCache::default_folder(), "");
  unsetenv("HEADRACE_CACHE_DIR");
  EXPECT_EQ(DiskCache::default_folder(), "/xdg/headrace");
  setenv("XDG_CACHE_HOME", "relative", 1);
  EXPECT_EQ(DiskCache::default_folder(), "/nowhere/.cache/headrace");
  unsetenv("XDG_CACHE_HOME");
  EXPECT_EQ(DiskCache::default_folder(), "/nowhere/.cache/headrace");
  unsetenv("HOME");
  EXPECT_EQ(DiskCache::default_folder(), "");
}

TEST(DiskCacheBound, FollowsTheEnvironment) {
  const Environment own("HEADRACE_CACHE_MAX_MB");
  unsetenv("HEADRACE_CACHE_MAX_MB");
  EXPECT_EQ(DiskCache::default_max_bytes(), std::uintmax_t{512} << 20);
  for (const char* text : {"", "many", "-1", "3.5", " 7", "99999999999999999999999"}) {
    setenv("HEADRACE_CACHE_MAX_MB", text, 1);
    EXPECT_EQ(DiskCache::default_max_bytes(), std::uintmax_t{512} << 20) << text;
  }
  setenv("HEADRACE_CACHE_MAX_MB", "3", 1);
  EXPECT_EQ(DiskCache::default_max_bytes(), std::uintmax_t{3} << 20);
  EXPECT_EQ(DiskCache("/nowhere").max_bytes(), std::uintmax_t{3} << 20);
  setenv("HEADRACE_CACHE_MAX_MB", "0", 1);
  EXPECT_EQ(DiskCache::default_max_bytes(), 0u);
  setenv("HEADRACE_CACHE_MAX_MB", "18446744073709551615", 1);
  EXPECT_GT(DiskCache::default_max_bytes(), std::uintmax_t{1} << 63);
}

}  // namespace
}  // namespace headrace::cuda
