#include "cuda/driver/cubin.hpp"

#include <elf.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "describe/problem.hpp"

namespace headrace::cuda {
namespace {

class Elf {
 public:
  explicit Elf(std::string_view bytes) : bytes_(bytes) {
    const auto header = read<Elf64_Ehdr>(0);
    if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64)
      throw Failure(HR_ERROR_RUNTIME, "cubin: is no 64-bit ELF file");
    for (std::size_t i = 0; i < header.e_shnum; ++i)
      sections_.push_back(read<Elf64_Shdr>(header.e_shoff + i * sizeof(Elf64_Shdr)));
    if (header.e_shstrndx < sections_.size()) names_ = sections_[header.e_shstrndx];
  }

  const Elf64_Shdr* section(std::string_view name) const {
    for (const Elf64_Shdr& candidate : sections_)
      if (text(names_, candidate.sh_name) == name) return &candidate;
    return nullptr;
  }
  std::string_view contents(const Elf64_Shdr& section) const {
    if (section.sh_type == SHT_NOBITS) return {};
    return part(section.sh_offset, section.sh_size);
  }
  // The number of a symbol and the symbol; -1 if there is none of that name.
  std::int64_t find_symbol(std::string_view name, Elf64_Sym& symbol) const {
    const Elf64_Shdr* table = section(".symtab");
    if (table == nullptr || table->sh_link >= sections_.size()) return -1;
    const std::size_t count = table->sh_size / sizeof(Elf64_Sym);
    for (std::size_t i = 0; i < count; ++i) {
      symbol = read<Elf64_Sym>(table->sh_offset + i * sizeof(Elf64_Sym));
      if (text(sections_[table->sh_link], symbol.st_name) == name) return static_cast<std::int64_t>(i);
    }
    return -1;
  }
  // The four bytes at a symbol's place.
  std::uint32_t value_at(const Elf64_Sym& symbol) const {
    if (symbol.st_shndx >= sections_.size()) throw damaged();
    return read<std::uint32_t>(sections_[symbol.st_shndx].sh_offset + symbol.st_value);
  }
  template <typename T>
  T read(std::size_t offset) const {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, part(offset, sizeof(T)).data(), sizeof(T));
    return value;
  }

 private:
  static Failure damaged() { return {HR_ERROR_RUNTIME, "cubin: is damaged"}; }
  std::string_view part(std::size_t offset, std::size_t size) const {
    if (offset > bytes_.size() || size > bytes_.size() - offset) throw damaged();
    return bytes_.substr(offset, size);
  }
  std::string_view text(const Elf64_Shdr& strings, std::size_t offset) const {
    const std::string_view all = part(strings.sh_offset, strings.sh_size);
    if (offset > all.size()) throw damaged();
    return all.substr(offset, all.find('\0', offset) - offset);
  }

  std::string_view bytes_;
  std::vector<Elf64_Shdr> sections_;
  Elf64_Shdr names_{};
};

// .nv.info is a list of attributes: a byte of format, a byte that names it, then two bytes of value (formats 1 to 3)
// or of length, with the value behind them. NVIDIA does not document it; its tools print it (cuobjdump -elf), and the
// tests hold what is read here against what ptxas reports.
constexpr std::uint8_t sized_value = 4, attribute_registers = 0x2f, attribute_frame = 0x11;

// The value of an attribute of a function: pairs of a symbol's number and a value.
int function_attribute(std::string_view info, std::uint8_t attribute, std::int64_t function) {
  for (std::size_t at = 0; at + 4 <= info.size();) {
    const auto format = static_cast<std::uint8_t>(info[at]), which = static_cast<std::uint8_t>(info[at + 1]);
    std::uint16_t size = 0;
    std::memcpy(&size, info.data() + at + 2, sizeof size);
    at += 4;
    if (format != sized_value) continue;
    if (which == attribute && size >= 8 && at + 8 <= info.size()) {
      std::uint32_t pair[2];
      std::memcpy(pair, info.data() + at, sizeof pair);
      if (pair[0] == function) return static_cast<int>(pair[1]);
    }
    at += size;
  }
  return 0;
}

}  // namespace

CubinReport inspect_cubin(std::string_view cubin, const std::string& entry) {
  const Elf elf(cubin);
  Elf64_Sym symbol{};
  const std::int64_t function = elf.find_symbol(entry, symbol);
  const Elf64_Shdr* info = elf.section(".nv.info");
  if (function < 0 || info == nullptr) throw Failure(HR_ERROR_RUNTIME, fmt::format("cubin: has no kernel {}", entry));
  CubinReport report;
  report.registers = function_attribute(elf.contents(*info), attribute_registers, function);
  report.stack_bytes = function_attribute(elf.contents(*info), attribute_frame, function);
  if (const Elf64_Shdr* shared = elf.section(".nv.shared." + entry))
    report.static_shared = static_cast<int>(shared->sh_size);
  if (elf.find_symbol("dynamic_shared_bytes", symbol) >= 0)
    report.dynamic_shared = static_cast<int>(elf.value_at(symbol));
  return report;
}

}  // namespace headrace::cuda
