// The safetensors format: a little-endian 64-bit header length, a JSON header, the tensors' bytes.
// Files come from anywhere, so everything in the header is checked before any of it is used.
// Format: https://github.com/huggingface/safetensors#format
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "array.hpp"

namespace headrace::tool {

// A file that cannot be read or is not what it claims to be. The message begins with the path.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An open file whose header has been validated; tensors are read when asked for.
class SafetensorsReader {
 public:
  struct Entry {
    std::string dtype;  // as in the file, "BF16"
    Shape shape;
    std::uint64_t begin = 0, end = 0;  // bytes, counted from the end of the header
  };

  // Throws FileError.
  explicit SafetensorsReader(const std::string& path);

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] const std::map<std::string, Entry>& entries() const { return entries_; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }
  [[nodiscard]] bool contains(const std::string& name) const { return entries_.contains(name); }

  // Throws FileError when there is no such tensor, its dtype is none of ours, a bool is neither 0 nor 1,
  // or the file has become shorter.
  Array read(const std::string& name);

 private:
  void parse_header(const std::string& text, std::uint64_t data_bytes);
  [[noreturn]] void fail(const std::string& message) const;

  std::string path_;
  std::ifstream file_;
  std::uint64_t data_offset_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

// Writes the tensors. path is replaced only once everything has been written. Throws FileError.
void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, const Array*>>& tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace headrace::tool
