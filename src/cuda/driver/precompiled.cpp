#include "cuda/driver/precompiled.hpp"

#include <charconv>
#include <mutex>
#include <shared_mutex>

#include "describe/problem.hpp"

namespace headrace::cuda {
namespace {

// The lines of a pack: this, then "DIGEST BYTES" for each cubin, then an empty line; behind it the cubins themselves.
constexpr std::string_view pack_header = "headrace pack 1\n";

using Index = std::map<std::string, std::string_view, std::less<>>;

Failure damaged() { return {HR_ERROR_RUNTIME, "precompiled kernels: the pack is damaged"}; }

void read_pack(std::string_view pack, Index& index) {
  if (pack.empty()) return;
  const std::size_t end = pack.find("\n\n");
  if (!pack.starts_with(pack_header) || end == std::string_view::npos) throw damaged();
  std::string_view list = pack.substr(pack_header.size(), end + 1 - pack_header.size());
  std::string_view cubins = pack.substr(end + 2);
  while (!list.empty()) {
    const std::size_t space = list.find(' '), line_end = list.find('\n');
    std::size_t bytes = 0;
    if (space > line_end) throw damaged();
    const std::string_view number = list.substr(space + 1, line_end - space - 1);
    const auto [rest, error] = std::from_chars(number.data(), number.data() + number.size(), bytes);
    if (error != std::errc() || rest != number.data() + number.size() || bytes > cubins.size()) throw damaged();
    index.emplace(list.substr(0, space), cubins.substr(0, bytes));
    cubins.remove_prefix(bytes);
    list.remove_prefix(line_end + 1);
  }
}

class Packs {
 public:
  Packs() { read_pack(embedded_pack(), index_); }
  void add(std::string_view pack) {
    const std::unique_lock lock(mutex_);
    read_pack(pack, index_);
  }
  std::optional<std::string_view> find(const std::string& digest) const {
    const std::shared_lock lock(mutex_);
    const auto found = index_.find(digest);
    return found == index_.end() ? std::nullopt : std::optional(found->second);
  }
  PrecompiledSize size() const {
    const std::shared_lock lock(mutex_);
    PrecompiledSize size{index_.size(), 0};
    for (const auto& [digest, cubin] : index_) size.bytes += cubin.size();
    return size;
  }

 private:
  mutable std::shared_mutex mutex_;
  Index index_;
};

Packs& packs() {
  static Packs known;
  return known;
}

}  // namespace

std::string write_pack(const std::map<std::string, std::string>& cubins) {
  std::string list(pack_header), bytes;
  for (const auto& [digest, cubin] : cubins) {
    list += digest + ' ' + std::to_string(cubin.size()) + '\n';
    bytes += cubin;
  }
  return list + '\n' + bytes;
}

void add_pack(std::string_view pack) { packs().add(pack); }

std::optional<std::string_view> find_precompiled(const std::string& digest) { return packs().find(digest); }

PrecompiledSize precompiled_size() { return packs().size(); }

}  // namespace headrace::cuda
