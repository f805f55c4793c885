// The safetensors reader against files that are broken or hostile, and the writer against the reader.
#include "safetensors.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace headrace::tool {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ =
        std::filesystem::path(::testing::TempDir()) /
        ("headrace_" + std::to_string(getpid()) + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  [[nodiscard]] std::string path(const std::string& name = "file.safetensors") const { return directory_ / name; }

  void write_bytes(const std::string& bytes) const { std::ofstream(path(), std::ios::binary) << bytes; }

  // A file of this header, with its length before it and `data` bytes behind it.
  void write_file(const std::string& header, std::size_t data) const {
    write_bytes(length(header.size()) + header + std::string(data, '\x01'));
  }

  static std::string length(std::uint64_t value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof value);
  }

  // What opening the file says, which must name the file first.
  [[nodiscard]] std::string error() const {
    try {
      SafetensorsReader reader(path());
    } catch (const FileError& failure) {
      EXPECT_THAT(failure.what(), StartsWith(path() + ": "));
      return failure.what();
    }
    return "no error";
  }

  std::string error_of(const std::string& header, std::size_t data) const {
    write_file(header, data);
    return error();
  }

 private:
  std::filesystem::path directory_;
};

TEST_F(Safetensors, ReturnsWhatWasWritten) {
  NormalSource source(1);
  const Array wide = normal_array(DType::float64, {2, 3}, source), narrow = normal_array(DType::float16, {5}, source);
  Array flags(DType::boolean, {3});
  flags.bytes[1] = std::byte{1};
  const Array empty(DType::float32, {0, 7}), scalar(DType::int32, {});
  // A name with every kind of character that JSON escapes.
  const std::string odd = "a\"b\\c\n\x01 \xC3\xA9";
  write_safetensors(path(),
                    {{odd, &narrow}, {"flags", &flags}, {"wide", &wide}, {"empty", &empty}, {"scalar", &scalar}},
                    {{"made by", "a test"}});

  SafetensorsReader reader(path());
  EXPECT_EQ(reader.entries().size(), 5u);
  EXPECT_EQ(reader.metadata().at("made by"), "a test");
  for (const auto& [name, array] :
       {std::pair(odd, narrow), {"flags", flags}, {"wide", wide}, {"empty", empty}, {"scalar", scalar}}) {
    const Array back = reader.read(name);
    EXPECT_EQ(back.dtype, array.dtype) << name;
    EXPECT_EQ(back.shape, array.shape) << name;
    EXPECT_EQ(back.bytes, array.bytes) << name;
  }
  // Each tensor lies at a multiple of its element size in the file.
  const std::uint64_t data = std::filesystem::file_size(path()) - (6 * 8 + 4 + 5 * 2 + 3);
  EXPECT_EQ(data % 8, 0u);
  EXPECT_EQ(reader.entries().at("wide").begin % 8, 0u);
  EXPECT_EQ(reader.entries().at(odd).begin % 2, 0u);
}

TEST_F(Safetensors, ReadsAHeaderPaddedWithSpaces) {
  write_file(R"({"x":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}     )", 4);
  EXPECT_EQ(SafetensorsReader(path()).read("x").shape, Shape{2});
}

TEST_F(Safetensors, RefusesFilesThatAreNone) {
  EXPECT_THAT(error(), HasSubstr("No such file or directory"));
  write_bytes("");
  EXPECT_THAT(error(), HasSubstr("is no safetensors file: it has only 0 bytes"));
  write_bytes("abc");
  EXPECT_THAT(error(), HasSubstr("is no safetensors file: it has only 3 bytes"));
  write_bytes("#!/bin/sh\necho this is a script\n");
  EXPECT_THAT(error(), HasSubstr("is no safetensors file, or is cut off"));
  write_file("[1, 2, 3]", 0);
  EXPECT_THAT(error(), HasSubstr("its header is no JSON object"));
  write_file("{\"x\": ", 0);
  EXPECT_THAT(error(), HasSubstr("the header is not valid JSON"));
  write_file("{\"\xFF\": 1}", 0);
  EXPECT_THAT(error(), HasSubstr("the header is not valid JSON"));
  EXPECT_THROW(SafetensorsReader(std::filesystem::temp_directory_path()), FileError);
}

TEST_F(Safetensors, RefusesHeaderLengthsBeyondTheFile) {
  for (const std::uint64_t value :
       {std::uint64_t{3}, std::uint64_t{1} << 32, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    write_bytes(length(value) + "{}");
    EXPECT_THAT(error(), HasSubstr("its header should have " + std::to_string(value) + " bytes, the file has 10"));
  }
}

TEST_F(Safetensors, RefusesAnEmptyHeader) {
  write_bytes(length(0) + "{}");
  EXPECT_THAT(error(), HasSubstr("its header is no JSON object"));
}

TEST_F(Safetensors, RefusesEntriesOfAnotherShape) {
  const auto entry = [&](const std::string& value) { return error_of("{\"x\":" + value + "}", 4); };
  EXPECT_THAT(entry("7"), HasSubstr("tensor \"x\": is no object"));
  EXPECT_THAT(entry(R"({"shape":[1],"data_offsets":[0,4]})"), HasSubstr("lacks dtype"));
  EXPECT_THAT(entry(R"({"dtype":"F32","data_offsets":[0,4]})"), HasSubstr("lacks shape"));
  EXPECT_THAT(entry(R"({"dtype":"F32","shape":[1]})"), HasSubstr("lacks data_offsets"));
  EXPECT_THAT(entry(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1})"), HasSubstr("has keys besides"));
  EXPECT_THAT(entry(R"({"dtype":32,"shape":[1],"data_offsets":[0,4]})"), HasSubstr("dtype is no string"));
  EXPECT_THAT(entry(R"({"dtype":"F33","shape":[1],"data_offsets":[0,4]})"), HasSubstr("dtype \"F33\" is not known"));
  EXPECT_THAT(entry(R"({"dtype":"F32","shape":1,"data_offsets":[0,4]})"), HasSubstr("shape is no array"));
  for (const char* dimension : {"-1", "1.0", "1.5", "\"1\"", "null", "1e3", "18446744073709551616"})
    EXPECT_THAT(entry(std::string(R"({"dtype":"F32","shape":[)") + dimension + R"(],"data_offsets":[0,4]})"),
                HasSubstr("is no natural number"));
  EXPECT_THAT(entry(R"({"dtype":"F32","shape":[1],"data_offsets":[0]})"), HasSubstr("data_offsets is no pair"));
  EXPECT_THAT(entry(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,8]})"), HasSubstr("data_offsets is no pair"));
  EXPECT_THAT(entry(R"({"dtype":"F32","shape":[1],"data_offsets":{"0":4}})"), HasSubstr("data_offsets is no pair"));
  EXPECT_THAT(entry(R"({"dtype":"F32","shape":[1],"data_offsets":[-4,0]})"), HasSubstr("is no natural number"));
}

TEST_F(Safetensors, RefusesOffsetsThatDoNotFit) {
  const auto offsets = [&](const std::string& value) {
    return error_of(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":)" + value + "}}", 8);
  };
  EXPECT_EQ(offsets("[0,8]"), "no error");
  EXPECT_THAT(offsets("[8,0]"), HasSubstr("do not lie inside the 8 bytes of data"));
  EXPECT_THAT(offsets("[0,9]"), HasSubstr("do not lie inside the 8 bytes of data"));
  EXPECT_THAT(offsets("[18446744073709551608,18446744073709551615]"), HasSubstr("do not lie inside"));
  EXPECT_THAT(offsets("[0,4]"), HasSubstr("hold 4 bytes, but F32 of shape [2] takes 8"));
}

TEST_F(Safetensors, RefusesShapesWhoseProductOverflows) {
  const auto shape = [&](const std::string& value) {
    return error_of(R"({"x":{"dtype":"F32","shape":)" + value + R"(,"data_offsets":[0,0]}})", 0);
  };
  // 2^32 * 2^32 * 4 is 0 modulo 2^64: just what the offsets claim.
  EXPECT_THAT(shape("[4294967296,4294967296]"), HasSubstr("overflows 64 bits"));
  EXPECT_THAT(shape("[4611686018427387904]"), HasSubstr("overflows 64 bits"));
  EXPECT_THAT(shape("[0,18446744073709551615]"), HasSubstr("overflows 64 bits"));
  EXPECT_EQ(shape("[0,4294967296]"), "no error");
}

TEST_F(Safetensors, RefusesOverlapsAndGaps) {
  const auto two = [&](const std::string& first, const std::string& second) {
    return error_of(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
                        R"(},"y":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}",
                    8);
  };
  EXPECT_EQ(two("[0,4]", "[4,8]"), "no error");
  EXPECT_EQ(two("[4,8]", "[0,4]"), "no error");
  EXPECT_THAT(two("[0,4]", "[0,4]"), HasSubstr("shares bytes with another tensor"));
  EXPECT_THAT(two("[0,4]", "[3,7]"), HasSubstr("tensor \"y\": shares bytes with another tensor"));
  EXPECT_THAT(error_of(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", 8),
              HasSubstr("unused bytes lie before it"));
  EXPECT_THAT(error_of(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 8),
              HasSubstr("4 unused bytes follow the last tensor"));
}

TEST_F(Safetensors, RefusesRepeatedNames) {
  const std::string x = R"("x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  EXPECT_THAT(error_of("{" + x + "," + x + "}", 4), HasSubstr("the header names \"x\" twice"));
  EXPECT_THAT(error_of(R"({"x":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4),
              HasSubstr("the header names \"dtype\" twice"));
}

TEST_F(Safetensors, RefusesDeepNestingBeforeItFillsMemory) {
  EXPECT_THAT(error_of("{\"x\":" + std::string(1'000'000, '['), 0), HasSubstr("the header nests too deeply"));
}

TEST_F(Safetensors, RefusesMetadataThatIsNotText) {
  EXPECT_THAT(error_of(R"({"__metadata__":[]})", 0), HasSubstr("__metadata__ is no object"));
  EXPECT_THAT(error_of(R"({"__metadata__":{"a":1}})", 0), HasSubstr("the value of \"a\" is no string"));
}

TEST_F(Safetensors, NamesFromTheFileCannotDriveTheTerminal) {
  const std::string message = error_of(R"({"\u001b[2J":7})", 0);
  EXPECT_EQ(message.find('\x1b'), std::string::npos) << message;
  EXPECT_THAT(message, HasSubstr("\\u001b[2J"));
}

TEST_F(Safetensors, EveryTruncationIsAnError) {
  NormalSource source(2);
  const Array x = normal_array(DType::float32, {3}, source);
  write_safetensors(path(), {{"x", &x}}, {});
  const auto size = std::filesystem::file_size(path());
  for (std::uintmax_t cut = 0; cut < size; ++cut) {
    std::filesystem::copy_file(path(), path("whole"), std::filesystem::copy_options::overwrite_existing);
    std::filesystem::resize_file(path(), cut);
    EXPECT_NE(error(), "no error") << "after " << cut << " bytes";
    std::filesystem::rename(path("whole"), path());
  }
}

TEST_F(Safetensors, ReadingNamesWhatIsWrong) {
  write_file(
      R"({"b":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},"u":{"dtype":"U16","shape":[1],"data_offsets":[1,3]}})",
      3);
  SafetensorsReader reader(path());
  const auto message = [&](const std::string& name) -> std::string {
    try {
      reader.read(name);
    } catch (const FileError& failure) {
      return failure.what();
    }
    return "no error";
  };
  EXPECT_EQ(message("b"), "no error");
  EXPECT_THAT(message("q"), HasSubstr("has no tensor \"q\"; it has: \"b\", \"u\""));
  EXPECT_THAT(message("u"), HasSubstr("dtype U16 cannot be used here"));

  std::fstream(path(), std::ios::in | std::ios::out | std::ios::binary)
      .seekp(static_cast<std::streamoff>(std::filesystem::file_size(path()) - 3))
      .put('\x02');
  EXPECT_THAT(message("b"), HasSubstr("a BOOL must be 0 or 1"));

  std::filesystem::resize_file(path(), std::filesystem::file_size(path()) - 3);  // behind the reader's back
  EXPECT_THAT(message("b"), HasSubstr("the file ends inside it"));
}

TEST_F(Safetensors, AFailedWriteLeavesTheOldFile) {
  const Array x(DType::float32, {4});
  write_safetensors(path(), {{"x", &x}}, {});
  std::filesystem::create_directory(path("directory"));
  EXPECT_THROW(write_safetensors(path("directory"), {{"x", &x}}, {}), FileError);
  EXPECT_THROW(write_safetensors(path("absent/file"), {{"x", &x}}, {}), FileError);
  EXPECT_THROW(write_safetensors("/dev/full", {{"x", &x}}, {}), FileError);
  EXPECT_EQ(SafetensorsReader(path()).entries().size(), 1u);
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& item :
       std::filesystem::directory_iterator(std::filesystem::path(path()).parent_path()))
    ++files;
  EXPECT_EQ(files, 2u);  // the file and the directory: nothing half-written stays
}

}  // namespace
}  // namespace headrace::tool
