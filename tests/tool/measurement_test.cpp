// bench and demo, as a user runs them at small sizes, and what they are made of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>
#include <sstream>

#include "contract.hpp"
#include "demo.hpp"
#include "fmt/format.h"
#include "measure.hpp"
#include "nlohmann/json.hpp"
#include "rounded_attention.hpp"
#include "run_command.hpp"
#include "safetensors.hpp"
#include "tile_picture.hpp"

namespace headrace::tool {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Json = nlohmann::json;

std::string contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class Bench : public CommandTest {};

TEST_F(Bench, BothMethodsAreRightInEveryType) {
  // Lengths and dimensions that no vector divides. The backward pass runs, and checks, the forward pass too.
  const auto check = [&](const std::string& dtype, const std::string& lengths, const std::vector<std::string>& flags) {
    std::vector<std::string> call = {"bench",   "--lengths", lengths,     "--heads", "3",      "--dim", "33",
                                     "--dtype", dtype,       "--repeats", "1",       "--json", "-"};
    call.insert(call.end(), flags.begin(), flags.end());
    SCOPED_TRACE(fmt::format("{}", fmt::join(call, " ")));
    const CommandResult result = run(call);
    ASSERT_EQ(result.code, 0) << result.err;
    const Json json = Json::parse(result.out);
    for (const Json& row : json["rows"]) {
      EXPECT_GT(row["headrace"]["seconds"], 0.0);
      EXPECT_GT(row["headrace"]["gflops"], 0.0);
      EXPECT_LE(row["headrace"]["error"], contract(parse_dtype(dtype)).gradient) << row["seqlen"];
      if (json["blas"] == "") {
        EXPECT_EQ(row["standard"]["skipped"], "no BLAS");
        continue;
      }
      EXPECT_GT(row["standard"]["seconds"], 0.0);
      EXPECT_LE(row["standard"]["error"], contract(parse_dtype(dtype)).gradient) << row["seqlen"];
      EXPECT_GT(row["speedup"], 0.0);
    }
  };
  check("float32", "1,17", {});
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    check(dtype, "67", {"--backward"});
    check(dtype, "67", {"--backward", "--causal"});
  }
}

TEST_F(Bench, MeasuresPeakMemory) {
  for (const bool preallocate : {false, true}) {  // what is made outside the clock still counts
    std::vector<std::string> call = {"bench", "--lengths", "2048", "--heads", "1", "--repeats", "1", "--json", "-"};
    if (preallocate) call.emplace_back("--preallocate");
    const CommandResult result = run(call);
    ASSERT_EQ(result.code, 0) << result.err;
    const Json json = Json::parse(result.out), row = json["rows"][0];
    EXPECT_EQ(row["standard"]["needs_bytes"], 2048 * 2048 * 4);
    EXPECT_LT(row["headrace"]["peak_bytes"], 32 << 20);
#if !defined(__SANITIZE_ADDRESS__)
    if (json["blas"] == "") continue;
    EXPECT_GE(row["standard"]["peak_bytes"], 2048 * 2048 * 4);
    EXPECT_LE(row["standard"]["peak_bytes"], 3 * 2048 * 2048 * 4);
    EXPECT_LT(row["headrace"]["peak_bytes"], row["standard"]["peak_bytes"]);
#endif
  }
}

TEST_F(Bench, SkipsStandardAttentionAboveItsLimitAndSaysSo) {
  const CommandResult result = run({"bench", "--lengths", "300", "--heads", "1", "--repeats", "1", "--max-memory",
                                    "1KiB", "--json", path("bench.json"), "--preallocate"});
  EXPECT_EQ(result.code, 0) << result.err;
  const Json json = Json::parse(contents(path("bench.json")));
  EXPECT_EQ(json["preallocate"], true);
  if (json["blas"] != "") {
    EXPECT_THAT(result.out, HasSubstr("needs 356.2 KiB: skipped"));
    EXPECT_EQ(json["rows"][0]["standard"]["skipped"], "needs 356.2 KiB");
  }
  EXPECT_FALSE(json["rows"][0].contains("speedup"));
  EXPECT_THAT(result.out, HasSubstr("seqlen"));
}

TEST_F(Bench, RefusesWhatItCannotMeasure) {
  const auto expect = [&](std::vector<std::string> arguments, int code, const std::string& text) {
    arguments.insert(arguments.begin(), "bench");
    const CommandResult result = run(arguments);
    EXPECT_EQ(result.code, code);
    EXPECT_THAT(result.err, StartsWith("headrace: error: "));
    EXPECT_THAT(result.err, HasSubstr(text));
  };
  expect({"--dtype", "float64"}, 2, "float64 is not measured");
  expect({"--lengths", "0"}, 2, "--lengths must be from 1");
  expect({"--lengths", "many"}, 2, "--lengths");
  expect({"--dim", "513"}, 2, "--dim from 1 to 512");
  expect({"--heads", "0"}, 2, "--heads must be at least 1");
  expect({"--threads", "-1"}, 2, "--threads must be");
  expect({"--repeats", "-1"}, 2, "--repeats must be");
  expect({"--max-memory", "much"}, 2, "--max-memory");
  expect({"--blas", "/absent/libblas.so"}, 3, "/absent/libblas.so");
  expect({"--blas", "libm.so.6"}, 3, "libm.so.6 has no cblas_sgemm");
  expect({"--lengths", "8", "--json", path("absent/file")}, 3, "cannot be written");
}

class Demo : public CommandTest {
 protected:
  [[nodiscard]] std::string write_sample(double size, const std::string& model) const {
    NormalSource source(7);
    Tensors tensors;
    for (const char* name : {"q", "k", "v"}) {
      tensors[name] = normal_array(DType::float32, {2, 20, 3, 8}, source);
      for (std::int64_t i = 0; i < tensors[name].size(); ++i) tensors[name].set(i, size * tensors[name].at(i));
    }
    write_safetensors(path("sample.safetensors"), {{"q", &tensors["q"]}, {"k", &tensors["k"]}, {"v", &tensors["v"]}},
                      {{"model", model}});
    return path("sample.safetensors");
  }
};

TEST_F(Demo, ChecksEveryHeadAndWritesAPageThatNeedsNothingElse) {
  const std::string sample = write_sample(1.0, "<script>alert('x')</script>");
  const CommandResult result = run({"demo", "--data", sample, "--lengths", "64,200", "--report", path("report.html")});
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  // 2 layers, 3 heads, 3 types, 2 masks, and 2 lengths.
  EXPECT_THAT(result.out, HasSubstr("All 38 checks are within the accuracy contract"));
  const std::string page = contents(path("report.html"));
  EXPECT_THAT(page, StartsWith("<!DOCTYPE html>"));
  EXPECT_THAT(page, HasSubstr("All 38 checks are within the accuracy contract"));
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert"));
  for (const char* outside : {"<script", "<link", "<img", "http:", "https:", "@import", "url(", "src="})
    EXPECT_THAT(page, Not(HasSubstr(outside)));
  for (const char* element : {"svg", "figure", "table", "div", "main"}) {
    const auto count = [&](const std::string& text) {
      std::size_t found = 0;
      for (std::size_t at = page.find(text); at != std::string::npos; at = page.find(text, at + 1)) ++found;
      return found;
    };
    EXPECT_EQ(count(fmt::format("<{}", element)), count(fmt::format("</{}>", element))) << element;
  }
}

TEST_F(Demo, ExitsWithCode1WhenResultsAreOutsideTheContract) {
  // Too large for float16: infinities come in, NaN come out.
  const CommandResult result = run({"demo", "--data", write_sample(1e6, "a test"), "--lengths", "64"});
  EXPECT_EQ(result.code, 1) << result.err;
  EXPECT_THAT(result.out, HasSubstr("BROKEN by 6 heads"));
  EXPECT_THAT(result.out, HasSubstr("OUTSIDE the accuracy contract"));
}

TEST_F(Demo, FindsItsSample) {
  const CommandResult result = run({"demo", "--lengths", "128"});
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("all-MiniLM-L6-v2"));
  EXPECT_THAT(result.out, HasSubstr("All 433 checks are within the accuracy contract"));
}

TEST_F(Demo, RefusesOtherData) {
  EXPECT_EQ(run({"demo", "--data", path("absent")}).code, 3);
  EXPECT_EQ(run({"demo", "--lengths", "0"}).code, 2);
  const Array q(DType::float32, {2, 20, 3, 8}), k(DType::float32, {2, 20, 1, 8});
  write_safetensors(path("other"), {{"q", &q}, {"k", &k}, {"v", &q}}, {});
  const CommandResult result = run({"demo", "--data", path("other")});
  EXPECT_EQ(result.code, 3);
  EXPECT_THAT(result.err, HasSubstr("k: is float32 [2, 20, 1, 8]"));
  EXPECT_EQ(run({"demo", "--data", write_sample(1, ""), "--lengths", "8", "--report", path("absent/report")}).code, 3);
}

TEST(ErrorsByHead, AppliesBothRulesOfTheContract) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  ErrorsByHead errors{.dtype = "float16", .causal = false, .promised = {1e-3, 3e-3, 3e-3, 3e-3, 1e-3}, .heads = {}};
  const auto add = [&](double dq, double standard) {
    errors.heads.push_back({.layer = 0,
                            .head = static_cast<std::int64_t>(errors.heads.size()),
                            .ours = {.out = 1e-4, .dq = dq},
                            .standard = {.dq = standard}});
  };
  add(3e-3, 1e-9);  // within the promise
  add(5e-2, 3e-2);  // harder than promised for, but so it is for standard attention
  add(5e-2, 2e-2);  // worse than twice standard attention
  add(nan, 1.0);    // never right
  EXPECT_EQ(errors.beyond_promise().size(), 3u);
  EXPECT_EQ(errors.broken(), 2);
  EXPECT_TRUE(std::isnan(errors.worst(&Errors::dq)));

  DemoResult result;
  result.machine = {{"simd", {{"chosen", "none"}}}};
  result.layers = 1, result.heads = 4, result.tokens = 8, result.dim = 16;
  result.errors = {errors};
  const std::string page = html_report(result);
  EXPECT_THAT(page, HasSubstr("2 of 4 checks are outside the accuracy contract"));
  EXPECT_THAT(page, HasSubstr("not finite"));
}

TEST(RoundedAttention, IsStandardAttentionUpToTheRoundingOfItsType) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (const bool causal : {false, true}) {
      NormalSource source(3);
      Tensors tensors;
      for (const char* name : {"q", "k", "v", "dout"}) tensors[name] = normal_array(dtype, {2, 30, 3, 16}, source);
      Tensors rounded = rounded_attention(tensors, causal);
      const Array peak = rounded.at("peak");
      rounded.erase("peak");
      for (auto& [name, array] : rounded) tensors[name] = std::move(array);
      Attention options;
      options.causal = causal ? Causal::bottom_right : Causal::none;
      const auto comparisons = compare_with_reference(options, tensors, true);
      EXPECT_EQ(comparisons.size(), 5u);
      for (const Comparison& c : comparisons) EXPECT_TRUE(c.ok()) << dtype_name(dtype) << " " << c.tensor << c.error;
      if (causal) {
        EXPECT_EQ(peak.at(0), 1.0);  // the first row sees one key
      }
      for (std::int64_t i = 0; i < peak.size(); ++i) EXPECT_TRUE(peak.at(i) > 1.0 / 31 && peak.at(i) <= 1.0);
    }
  }
}

TEST(Contract, NoticesWrongResults) {
  NormalSource source(4);
  Tensors right;
  for (const char* name : {"q", "k", "v", "dout"}) right[name] = normal_array(DType::float32, {1, 12, 2, 16}, source);
  for (const char* name : {"out", "dq", "dk", "dv"}) right[name] = Array(DType::float32, {1, 12, 2, 16});
  right["lse"] = Array(DType::float32, {1, 2, 12});
  const Attention options{.backend = Backend::reference};
  Attention call = options;
  bind_tensors(call, right);
  forward(call);
  backward(call);
  const auto failing = [&](const Tensors& tensors) {
    std::vector<std::string> names;
    for (const Comparison& c : compare_with_reference(options, tensors, true))
      if (!c.ok()) names.push_back(c.tensor);
    return names;
  };
  EXPECT_TRUE(failing(right).empty());
  for (const char* name : {"out", "lse", "dq", "dk", "dv"}) {
    for (const double wrong :
         {1e-3, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      Tensors tensors = right;
      tensors[name].set(5, tensors[name].at(5) + wrong);
      EXPECT_EQ(failing(tensors), std::vector<std::string>{name}) << wrong;
    }
  }
}

TEST(InChild, ReturnsResultsAndErrors) {
  EXPECT_EQ(in_child([] { return Json{{"answer", 42}}; })["answer"], 42);
  const std::string long_text(1 << 20, 'x');  // more than a pipe holds
  EXPECT_EQ(in_child([&] { return Json(long_text); }), long_text);
  const auto message = [](const std::function<Json()>& work) -> std::string {
    try {
      in_child(work);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([]() -> Json { throw std::runtime_error("it broke"); }), "it broke");
  EXPECT_EQ(message([]() -> Json { throw std::bad_alloc(); }), "there is not enough memory");
  EXPECT_THAT(message([]() -> Json {
                raise(SIGKILL);
                return {};
              }),
              HasSubstr("killed by signal 9"));
  EXPECT_EQ(message([]() -> Json { _exit(0); }), "a measurement ended without a result");
}

TEST(TilePicture, CountsTheTilesOfTheWalk) {
  const Visibility causal{
      .band = Band::make(8, 8, true, false, INT64_MAX, INT64_MAX), .seqlen_q = 8, .seqlen_k = 8, .blocks = {}};
  const TilePicture picture = draw_tiles(causal, 2, 2, "test");
  EXPECT_EQ(picture.full, 6);
  EXPECT_EQ(picture.edge, 4);
  EXPECT_EQ(picture.hidden, 6);
  const TilePicture ragged = draw_tiles(causal, 3, 5, "test");
  EXPECT_EQ(ragged.tiles(), 6);
}

TEST(Format, ReadsWell) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(17179869184.0), "16.0 GiB");
  EXPECT_EQ(format_seconds(2.5e-5), "25.0 us");
  EXPECT_EQ(format_seconds(0.0125), "12.50 ms");
  EXPECT_EQ(format_seconds(0.25), "250 ms");
  EXPECT_EQ(format_seconds(2.5), "2.50 s");
  EXPECT_EQ(median({3.0, 1.0, 2.0}), 2.0);
  EXPECT_EQ(median({4.0, 1.0, 2.0, 3.0}), 2.5);
}

}  // namespace
}  // namespace headrace::tool
