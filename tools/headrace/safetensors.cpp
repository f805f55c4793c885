#include "safetensors.hpp"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <set>

#include "fmt/format.h"
#include "nlohmann/json.hpp"

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

namespace headrace::tool {
namespace {

using Json = nlohmann::json;

// As in the reference implementation: a longer header is an attack, not a model.
constexpr std::uint64_t max_header_bytes = 100'000'000;

struct Format {
  const char* name;
  std::uint64_t element_bytes;
  int dtype;  // hr_dtype, or -1: can be stored but not used here
};

constexpr Format formats[] = {
    {"F32", 4, HR_FLOAT32}, {"F16", 2, HR_FLOAT16}, {"BF16", 2, HR_BFLOAT16}, {"F64", 8, HR_FLOAT64},
    {"BOOL", 1, HR_BOOL},   {"I32", 4, HR_INT32},   {"I64", 8, HR_INT64},     {"U8", 1, -1},
    {"I8", 1, -1},          {"U16", 2, -1},         {"I16", 2, -1},           {"U32", 4, -1},
    {"U64", 8, -1},         {"F8_E4M3", 1, -1},     {"F8_E5M2", 1, -1},
};

const Format* find_format(const std::string& name) {
  const auto* found = std::ranges::find_if(formats, [&](const Format& f) { return name == f.name; });
  return found == std::end(formats) ? nullptr : found;
}

const char* format_of(DType dtype) {
  return std::ranges::find_if(formats, [&](const Format& f) { return f.dtype == static_cast<int>(dtype); })->name;
}

// A name from a file, fit for a terminal: control characters are escaped.
std::string quoted(const std::string& name) { return Json(name).dump(); }

// Parses a header; throws std::runtime_error where it nests deeper than the format does or repeats a name,
// of which a plain parser would silently keep the last.
Json parse_strictly(const std::string& text) {
  constexpr int max_depth = 3;
  std::vector<std::set<std::string>> names;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > max_depth) throw std::runtime_error("nests too deeply");
    if (event == Json::parse_event_t::object_start) names.emplace_back();
    if (event == Json::parse_event_t::object_end) names.pop_back();
    if (event == Json::parse_event_t::key && !names.back().insert(parsed.get<std::string>()).second)
      throw std::runtime_error(fmt::format("names {} twice", parsed.dump()));
    return true;
  };
  return Json::parse(text, watch);
}

// An integer of the header, which may not be negative, a fraction or a string.
std::uint64_t natural_number(const Json& value) {
  if (!value.is_number_unsigned()) throw std::runtime_error(fmt::format("{} is no natural number", value.dump()));
  return value.get<std::uint64_t>();
}

// Throws std::runtime_error saying what is wrong with the entry.
SafetensorsReader::Entry parse_entry(const Json& json, std::uint64_t data_bytes) {
  if (!json.is_object()) throw std::runtime_error("is no object");
  for (const char* key : {"dtype", "shape", "data_offsets"})
    if (!json.contains(key)) throw std::runtime_error(fmt::format("lacks {}", key));
  if (json.size() != 3) throw std::runtime_error("has keys besides dtype, shape and data_offsets");
  if (!json["dtype"].is_string()) throw std::runtime_error("dtype is no string");
  if (!json["shape"].is_array()) throw std::runtime_error("shape is no array");
  const Json& offsets = json["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) throw std::runtime_error("data_offsets is no pair");

  SafetensorsReader::Entry entry;
  entry.dtype = json["dtype"];
  const Format* format = find_format(entry.dtype);
  if (format == nullptr) throw std::runtime_error(fmt::format("dtype {} is not known", json["dtype"].dump()));

  std::uint64_t bytes = format->element_bytes;
  for (const Json& dimension : json["shape"]) {
    const std::uint64_t value = natural_number(dimension);
    // A dimension of 0 would hide an overflow of the others, so each is bounded as well as the product.
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) ||
        __builtin_mul_overflow(bytes, value, &bytes))
      throw std::runtime_error(fmt::format("shape {} overflows 64 bits", json["shape"].dump()));
    entry.shape.push_back(static_cast<std::int64_t>(value));
  }
  entry.begin = natural_number(offsets[0]);
  entry.end = natural_number(offsets[1]);
  if (entry.begin > entry.end || entry.end > data_bytes)
    throw std::runtime_error(
        fmt::format("data_offsets {} do not lie inside the {} bytes of data", offsets.dump(), data_bytes));
  if (entry.end - entry.begin != bytes)
    throw std::runtime_error(fmt::format("data_offsets {} hold {} bytes, but {} of shape {} takes {}", offsets.dump(),
                                         entry.end - entry.begin, entry.dtype, json["shape"].dump(), bytes));
  return entry;
}

}  // namespace

SafetensorsReader::SafetensorsReader(const std::string& path) : path_(path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) fail("is a directory");
  file_.open(path, std::ios::binary);
  if (!file_) fail(std::strerror(errno));
  const std::uint64_t file_bytes = std::filesystem::file_size(path, error);
  if (error) fail(error.message());

  std::uint64_t header_bytes = 0;
  if (file_bytes < sizeof header_bytes) fail(fmt::format("is no safetensors file: it has only {} bytes", file_bytes));
  file_.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
  if (header_bytes > max_header_bytes || header_bytes > file_bytes - sizeof header_bytes)
    fail(fmt::format("is no safetensors file, or is cut off: its header should have {} bytes, the file has {}",
                     header_bytes, file_bytes));
  std::string text(header_bytes, '\0');
  if (!file_.read(text.data(), static_cast<std::streamsize>(header_bytes))) fail("cannot be read");
  if (!text.starts_with('{')) fail("is no safetensors file: its header is no JSON object");
  data_offset_ = sizeof header_bytes + header_bytes;
  parse_header(text, file_bytes - data_offset_);
}

void SafetensorsReader::parse_header(const std::string& text, std::uint64_t data_bytes) {
  Json header;
  try {
    header = parse_strictly(text);
  } catch (const Json::exception&) {
    fail("the header is not valid JSON");
  } catch (const std::runtime_error& error) {
    fail(fmt::format("the header {}", error.what()));
  }
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) fail("__metadata__ is no object");
      for (const auto& [key, text_value] : value.items()) {
        if (!text_value.is_string()) fail(fmt::format("__metadata__: the value of {} is no string", quoted(key)));
        metadata_[key] = text_value;
      }
      continue;
    }
    try {
      entries_[name] = parse_entry(value, data_bytes);
    } catch (const std::runtime_error& error) {
      fail(fmt::format("tensor {}: {}", quoted(name), error.what()));
    }
  }

  // The format leaves no byte of the data unowned, and none owned twice.
  std::vector<std::pair<std::string, Entry>> ordered(entries_.begin(), entries_.end());
  std::ranges::sort(ordered, {}, [](const auto& e) { return std::pair(e.second.begin, e.second.end); });
  std::uint64_t expected = 0;
  for (const auto& [name, entry] : ordered) {
    if (entry.begin < expected) fail(fmt::format("tensor {}: shares bytes with another tensor", quoted(name)));
    if (entry.begin > expected) fail(fmt::format("tensor {}: unused bytes lie before it", quoted(name)));
    expected = entry.end;
  }
  if (expected != data_bytes) fail(fmt::format("{} unused bytes follow the last tensor", data_bytes - expected));
}

Array SafetensorsReader::read(const std::string& name) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    std::vector<std::string> names;
    for (const auto& item : entries_) names.push_back(quoted(item.first));
    fail(fmt::format("has no tensor {}; it has: {}", quoted(name),
                     names.empty() ? "none" : fmt::to_string(fmt::join(names, ", "))));
  }
  const Entry& entry = found->second;
  const Format* format = find_format(entry.dtype);
  if (format->dtype < 0)
    fail(fmt::format("tensor {}: dtype {} cannot be used here; F32, F16, BF16, F64, BOOL, I32 and I64 can",
                     quoted(name), entry.dtype));
  Array array(static_cast<DType>(format->dtype), entry.shape);
  file_.clear();
  file_.seekg(static_cast<std::streamoff>(data_offset_ + entry.begin));
  if (!file_.read(reinterpret_cast<char*>(array.bytes.data()), static_cast<std::streamsize>(array.bytes.size())))
    fail(fmt::format("tensor {}: the file ends inside it", quoted(name)));
  if (array.dtype == DType::boolean &&
      std::ranges::any_of(array.bytes, [](std::byte value) { return std::to_integer<int>(value) > 1; }))
    fail(fmt::format("tensor {}: a BOOL must be 0 or 1", quoted(name)));
  return array;
}

void SafetensorsReader::fail(const std::string& message) const {
  throw FileError(fmt::format("{}: {}", path_, message));
}

void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, const Array*>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  // Wide elements first keeps every tensor aligned to its elements, for readers that map the file.
  auto ordered = tensors;
  std::ranges::stable_sort(ordered, std::ranges::greater(),
                           [](const auto& t) { return element_size(t.second->dtype); });
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const auto& [name, array] : ordered) {
    const std::uint64_t end = offset + array->bytes.size();
    header[name] = {{"dtype", format_of(array->dtype)}, {"shape", array->shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  const std::uint64_t header_bytes = text.size();

  // Written beside the target and then moved, so that a full disk leaves no half file; a pipe or a
  // device cannot be moved to.
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  const bool in_place = std::filesystem::exists(status) && !std::filesystem::is_regular_file(status);
  const std::string target = in_place ? path : fmt::format("{}.{}.partial", path, getpid());
  const auto fail = [&](const std::string& why) {
    if (!in_place) std::filesystem::remove(target, error);
    throw FileError(fmt::format("{}: cannot be written: {}", path, why));
  };
  if (std::filesystem::is_directory(status)) throw FileError(fmt::format("{}: is a directory", path));
  errno = 0;
  std::ofstream file(target, std::ios::binary | std::ios::trunc);
  if (!file) fail(std::strerror(errno));
  file.write(reinterpret_cast<const char*>(&header_bytes), sizeof header_bytes);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const auto& [name, array] : ordered)
    file.write(reinterpret_cast<const char*>(array->bytes.data()), static_cast<std::streamsize>(array->bytes.size()));
  file.close();
  if (!file) fail(errno != 0 ? std::strerror(errno) : "the disk may be full");
  if (!in_place) {
    std::filesystem::rename(target, path, error);
    if (error) fail(error.message());
  }
}

}  // namespace headrace::tool
