// info, explain and attend: results, exit codes and the text of errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "array.hpp"
#include "contract.hpp"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "run_command.hpp"
#include "safetensors.hpp"

namespace headrace::tool {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using Json = nlohmann::json;

class Command : public CommandTest {
 protected:
  void expect_error(const std::vector<std::string>& arguments, int code, const std::string& text) const {
    const CommandResult result = run(arguments);
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_THAT(result.err, StartsWith("headrace: error: "));
    EXPECT_THAT(result.err, HasSubstr(text));
  }

  std::string write(const Tensors& tensors, const std::string& name = "in.safetensors") const {
    std::vector<std::pair<std::string, const Array*>> list;
    for (const auto& [key, array] : tensors) list.emplace_back(key, &array);
    write_safetensors(path(name), list, {});
    return path(name);
  }

  NormalSource source_{1};

  Tensors example(DType dtype = DType::float32) {
    Tensors t;
    t["q"] = normal_array(dtype, {2, 5, 4, 8}, source_);
    t["k"] = normal_array(dtype, {2, 7, 2, 8}, source_);
    t["v"] = normal_array(dtype, {2, 7, 2, 6}, source_);
    t["dout"] = normal_array(dtype, {2, 5, 4, 6}, source_);
    return t;
  }
};

// What the command wrote must be, bit for bit, what the library gives for the same call.
void expect_same(SafetensorsReader& file, const std::string& name, const Array& expected) {
  const Array array = file.read(name);
  EXPECT_EQ(array.dtype, expected.dtype) << name;
  EXPECT_EQ(array.shape, expected.shape) << name;
  EXPECT_EQ(array.bytes, expected.bytes) << name;
}

TEST_F(Command, TellsItsVersion) {
  const CommandResult result = run({"--version"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out, fmt::format("headrace {}\n", version()));
}

TEST_F(Command, HelpHasExamplesForEverySubcommand) {
  const CommandResult all = run({"--help"});
  EXPECT_EQ(all.code, 0);
  for (const char* name : {"info", "attend", "bench", "explain", "demo"}) {
    EXPECT_THAT(all.out, HasSubstr(name));
    const CommandResult result = run({name, "--help"});
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.err, IsEmpty());
    EXPECT_THAT(result.out, ContainsRegex(std::string("Examples:\n  headrace ") + name));
  }
}

TEST_F(Command, WrongUsageIsExitCode2) {
  expect_error({}, 2, "subcommand is required");
  expect_error({"frobnicate"}, 2, "frobnicate is no command");
  expect_error({"info", "--frobnicate"}, 2, "--frobnicate");
  expect_error({"attend"}, 2, "FILE is required");
  expect_error({"attend", "x"}, 2, "give --output FILE, --check, or both");
  expect_error({"attend", "x", "--check", "--causal=sideways"}, 2, "sideways");
  expect_error({"attend", "x", "--check", "--scale", "wide"}, 2, "--scale");
  expect_error({"attend", "x", "--check", "--window-left", "1.5"}, 2, "--window-left");
  expect_error({"attend", "x", "--check", "--window-left", "99999999999999999999"}, 2,
               "is no integer from -9223372036854775808 to 9223372036854775807");
  expect_error({"attend", "x", "--check", "--seed", "-1"}, 2, "--seed");
  expect_error({"attend", "x", "--check", "--dtype", "int8"}, 2, "dtype int8 is not known");
  expect_error({"attend", "x", "--check", "--dtype", "int32"}, 2, "--dtype: int32 is no type of q");
  expect_error({"attend", "x", "--check", "--dbias"}, 2, "give --backward");
  expect_error({"attend", "x", "--check", "--name", "q"}, 2, "--name: q has no '='");
  expect_error({"attend", "x", "--check", "--name", "queries=q"}, 2, "--name: queries is no input");
  expect_error({"explain", "--bias-shape", "1,2"}, 2, "--bias-shape");
}

TEST_F(Command, InfoPrintsWhatTheLibrarySays) {
  const CommandResult json = run({"info", "--json"});
  EXPECT_EQ(json.code, 0) << json.err;
  const Json expected = Json::parse(info());
  EXPECT_EQ(Json::parse(json.out), expected);
  const CommandResult text = run({"info"});
  EXPECT_EQ(text.code, 0) << text.err;
  for (const auto& [key, value] : expected.items()) EXPECT_THAT(text.out, HasSubstr(key));
}

TEST_F(Command, ExplainsShapesWithoutAllocatingThem) {
  const std::vector<std::string> call = {
      "explain", "--batch", "2",       "--seqlen-q", "1048576",  "--heads",       "16",   "--heads-kv", "4",
      "--dim",   "128",     "--dtype", "bfloat16",   "--causal", "--window-left", "4095", "--backend",  "reference"};
  Attention a{.causal = Causal::bottom_right, .window_left = 4095, .backend = Backend::reference};
  a.q = a.out = {nullptr, DType::bfloat16, {2, 1048576, 16, 128}};
  a.k = a.v = {nullptr, DType::bfloat16, {2, 1048576, 4, 128}};
  a.lse = {nullptr, DType::float32, {2, 16, 1048576}};
  const Plan forward(a, Pass::forward);
  const CommandResult text = run(call);
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_EQ(text.out, forward.explain());

  a.dout = a.out, a.dq = a.q, a.dk = a.k, a.dv = a.v;
  const Plan backward(a, Pass::backward);
  std::vector<std::string> as_json = call;
  as_json.insert(as_json.end(), {"--backward", "--json"});
  const CommandResult json = run(as_json);
  EXPECT_EQ(json.code, 0) << json.err;
  EXPECT_EQ(Json::parse(json.out), Json::parse(backward.explain_json()));
  EXPECT_NE(Json::parse(json.out), Json::parse(forward.explain_json()));
}

TEST_F(Command, ExplainDescribesOptionalTensors) {
  const auto code = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"explain", "--seqlen-q", "16", "--seqlen-k", "24", "--heads", "4", "--dim", "8",
                               "--value-dim", "12", "--backend", "reference"});
    return run(more).code;
  };
  EXPECT_EQ(code({"--bias-shape", "1,4,16,24", "--mask-shape", "1,1,1,24", "--alibi", "--sinks"}), 0);
  EXPECT_EQ(code({"--bias-shape", "1,4,1,24", "--alibi", "--sinks", "--backward"}), 0);
  EXPECT_EQ(code({"--bias-shape", "1,4,16,25"}), 3);
  EXPECT_EQ(code({"--mask-shape", "2,1,1,24"}), 3);
}

TEST_F(Command, ErrorsOfTheLibraryAreExitCode3) {
  expect_error({"explain", "--dim", "0"}, 3, "q: ");
  expect_error({"explain", "--heads", "4", "--heads-kv", "3"}, 3, "3");
  expect_error({"explain", "--dropout-p", "1"}, 3, "dropout_p");
  expect_error({"explain", "--threads", "-1"}, 3, "threads");
}

TEST_F(Command, AttendWritesWhatTheLibraryComputes) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::float64}) {
    Tensors t = example(dtype);
    const std::string input = write(t);
    const CommandResult result = run({"attend", input, "-o", path("out.safetensors"), "--causal", "--scale", "-0.25",
                                      "--softcap", "3", "--backward", "--backend", "reference"});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.err, IsEmpty());

    t["out"] = Array(dtype, {2, 5, 4, 6});
    t["lse"] = Array(dtype == DType::float64 ? DType::float64 : DType::float32, {2, 4, 5});
    for (const char* name : {"q", "k", "v"}) t[fmt::format("d{}", name)] = Array(dtype, t[name].shape);
    Attention a{.causal = Causal::bottom_right, .scale = -0.25, .softcap = 3.0, .backend = Backend::reference};
    bind_tensors(a, t);
    forward(a);
    backward(a);
    SafetensorsReader file(path("out.safetensors"));
    EXPECT_EQ(file.entries().size(), 5u);
    for (const char* name : {"out", "lse", "dq", "dk", "dv"}) expect_same(file, name, t[name]);
  }
}

TEST_F(Command, AttendConvertsAndRenames) {
  Tensors t = example(DType::float64);
  Tensors renamed = {{"attn.q", t["q"]}, {"attn.k", t["k"]}, {"v", t["v"]}, {"bias", Array(DType::float32, {9})}};
  const CommandResult result =
      run({"attend", write(renamed), "--name", "q=attn.q", "--name", "k=attn.k", "--name", "bias=", "--dtype",
           "float16", "-o", path("out.safetensors"), "--backend", "reference"});
  EXPECT_EQ(result.code, 0) << result.err;
  for (const char* name : {"q", "k", "v"}) t[name] = convert(t[name], DType::float16);
  t["out"] = Array(DType::float16, {2, 5, 4, 6});
  t["lse"] = Array(DType::float32, {2, 4, 5});
  Attention a{.backend = Backend::reference};
  bind_tensors(a, t);
  forward(a);
  SafetensorsReader file(path("out.safetensors"));
  expect_same(file, "out", t["out"]);
  expect_same(file, "lse", t["lse"]);
}

TEST_F(Command, AttendReadsRaggedBatchesWithInt64Metadata) {
  Tensors t;
  t["q"] = normal_array(DType::float32, {9, 2, 8}, source_);
  t["k"] = normal_array(DType::float32, {11, 2, 8}, source_);
  t["v"] = normal_array(DType::float32, {11, 2, 8}, source_);
  Array cu_q(DType::int32, {3}), cu_k(DType::int32, {3});
  const std::int32_t starts_q[] = {0, 4, 9}, starts_k[] = {0, 6, 10};
  std::memcpy(cu_q.bytes.data(), starts_q, sizeof starts_q);
  std::memcpy(cu_k.bytes.data(), starts_k, sizeof starts_k);
  Array wide(DType::int64, {3});
  const std::int64_t wide_starts[] = {0, 4, 9};
  std::memcpy(wide.bytes.data(), wide_starts, sizeof wide_starts);
  t["cu_seqlens_q"] = wide;
  t["cu_seqlens_k"] = cu_k;
  const CommandResult result = run({"attend", write(t), "-o", path("out.safetensors"), "--backend", "reference"});
  EXPECT_EQ(result.code, 0) << result.err;

  t["cu_seqlens_q"] = cu_q;
  t["out"] = Array(DType::float32, {9, 2, 8});
  t["lse"] = Array(DType::float32, {2, 9});
  Attention a{.backend = Backend::reference};
  bind_tensors(a, t);
  forward(a);
  SafetensorsReader file(path("out.safetensors"));
  expect_same(file, "out", t["out"]);
  expect_same(file, "lse", t["lse"]);

  const std::int64_t too_far[] = {0, 4, std::int64_t{1} << 40};
  std::memcpy(wide.bytes.data(), too_far, sizeof too_far);
  t["cu_seqlens_q"] = wide;
  expect_error({"attend", write(t), "--check"}, 3, "cu_seqlens_q: 1099511627776 at 2 does not fit int32");
}

TEST_F(Command, AttendGivesGradientsOfBiasAndSinksOnRequest) {
  Tensors t = example();
  t["bias"] = normal_array(DType::float32, {1, 4, 5, 7}, source_);
  t["sinks"] = normal_array(DType::float32, {4}, source_);
  const std::string input = write(t);
  for (const bool wanted : {false, true}) {
    std::vector<std::string> call = {"attend",     input,     "-o",        path("out.safetensors"),
                                     "--backward", "--check", "--backend", "reference"};
    if (wanted) call.insert(call.end(), {"--dbias", "--dsinks"});
    const CommandResult result = run(call);
    EXPECT_EQ(result.code, 0) << result.err << result.out;
    SafetensorsReader file(path("out.safetensors"));
    EXPECT_EQ(file.contains("dbias"), wanted);
    EXPECT_EQ(file.contains("dsinks"), wanted);
  }
}

TEST_F(Command, AttendNamesWhatIsWrongWithItsInput) {
  const auto attend = [&](const Tensors& t, std::vector<std::string> more, const std::string& text) {
    more.insert(more.begin(), {"attend", write(t), "--check", "--backend", "reference"});
    expect_error(more, 3, text);
  };
  expect_error({"attend", path("absent"), "--check"}, 3, path("absent") + ": No such file or directory");
  std::ofstream(path("junk")) << "this is no tensor file";
  expect_error({"attend", path("junk"), "--check"}, 3, path("junk") + ": is no safetensors file");

  Tensors t = example();
  t.erase("k");
  attend(t, {}, "has no tensor \"k\"; it has: \"dout\", \"q\", \"v\"");
  t = example();
  attend(t, {"--name", "v=values"}, "has no tensor \"values\"");
  attend(t, {"--name", "mask=visible"}, "has no tensor \"visible\"");
  t.erase("dout");
  attend(t, {"--backward"}, "has no tensor \"dout\"");
  t = example();
  t["q"] = Array(DType::int32, {2, 5, 4, 8});
  attend(t, {}, "q: dtype is int32; it must be float32, float16, bfloat16 or float64");
  t["q"] = normal_array(DType::float32, {5, 8}, source_);
  attend(t, {}, "q: shape is [5, 8]; it must be [batch, seqlen, heads, dim]");
  t["q"] = normal_array(DType::float32, {2, 5, 4, 9}, source_);
  attend(t, {}, "head_dim");
  t["q"] = normal_array(DType::float16, {2, 5, 4, 8}, source_);
  attend(t, {}, "dtype");
}

TEST_F(Command, AFailedAttendLeavesTheOutputAlone) {
  std::ofstream(path("out.safetensors")) << "precious";
  Tensors t = example();
  t["mask"] = Array(DType::boolean, {2, 3, 5, 7});
  expect_error({"attend", write(t), "-o", path("out.safetensors")}, 3, "mask");
  std::string text;
  std::ifstream(path("out.safetensors")) >> text;
  EXPECT_EQ(text, "precious");

  t.erase("mask");
  expect_error({"attend", write(t), "-o", path("absent/out.safetensors"), "--backend", "reference"}, 3,
               path("absent/out.safetensors") + ": cannot be written");
}

TEST_F(Command, AttendSummarisesAsJson) {
  Tensors t = example();
  t["alibi_slopes"] = normal_array(DType::float32, {4}, source_);
  const std::string input = write(t);
  const CommandResult result =
      run({"attend", input, "--check", "--json", "--backend", "reference", "--window-right", "-1"});
  EXPECT_EQ(result.code, 0) << result.err;
  const Json json = Json::parse(result.out);
  EXPECT_EQ(json["inputs"]["q"]["shape"], Json({2, 5, 4, 8}));
  EXPECT_EQ(json["inputs"]["alibi_slopes"]["dtype"], "float32");
  EXPECT_EQ(json["options"], "window_right -1, backend reference");
  EXPECT_EQ(json["ok"], true);
  EXPECT_LE(json["check"]["out"]["error"], 2e-6);
  EXPECT_TRUE(json["seconds"].contains("forward"));
}

TEST_F(Command, CheckFailsWithExitCode1OutsideTheContract) {
  // Halfway between two neighbouring float16 numbers near the smallest of all: rounding alone is far more
  // than the contract allows for ordinary numbers.
  Tensors t;
  t["q"] = Array(DType::float16, {1, 1, 1, 1});
  t["k"] = Array(DType::float16, {1, 2, 1, 1});
  t["v"] = Array(DType::float16, {1, 2, 1, 1});
  t["v"].set(1, 0x1p-24);
  const CommandResult result = run({"attend", write(t), "--check", "--backend", "reference"});
  EXPECT_EQ(result.code, 1) << result.err << result.out;
  EXPECT_THAT(result.out, HasSubstr("OUTSIDE THE CONTRACT"));
}

TEST_F(Command, CheckPassesOnRandomOptions) {
  const char* text = std::getenv("HEADRACE_TEST_SEED");
  const std::uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 0) : std::random_device()();
  SCOPED_TRACE(fmt::format("repeat with HEADRACE_TEST_SEED={}", seed));
  std::mt19937_64 generator(seed);
  const auto chance = [&](double p) { return std::uniform_real_distribution<>()(generator) < p; };
  const auto integer = [&](std::int64_t lo, std::int64_t hi) {
    return std::uniform_int_distribution<std::int64_t>(lo, hi)(generator);
  };
  NormalSource source(seed);
  const char* scale = std::getenv("HEADRACE_TEST_SCALE");
  const int rounds = std::max(5, static_cast<int>(60 * (scale != nullptr ? std::strtod(scale, nullptr) : 1.0)));
  for (int round = 0; round < rounds; ++round) {
    const DType dtypes[] = {DType::float32, DType::float16, DType::bfloat16, DType::float64};
    const DType dtype = dtypes[integer(0, 3)];
    const std::int64_t b = integer(1, 2), sq = integer(1, 40), sk = integer(1, 60), hk = integer(1, 2);
    const std::int64_t hq = hk * integer(1, 3), d = integer(1, 70), dv = integer(1, 70);
    const auto pair_shape = [&] {
      return Shape{chance(0.5) ? b : 1, chance(0.5) ? hq : 1, chance(0.7) ? sq : 1, chance(0.7) ? sk : 1};
    };
    const auto booleans = [&](Shape shape, double visible) {
      Array array(DType::boolean, std::move(shape));
      for (std::byte& value : array.bytes) value = std::byte{chance(visible)};
      return array;
    };
    Tensors t;
    t["q"] = normal_array(dtype, {b, sq, hq, d}, source);
    t["k"] = normal_array(dtype, {b, sk, hk, d}, source);
    t["v"] = normal_array(dtype, {b, sk, hk, dv}, source);
    t["dout"] = normal_array(dtype, {b, sq, hq, dv}, source);
    std::vector<std::string> call = {
        "attend",
        path("in.safetensors"),
        "--check",
        "--backward",
    };
    const auto add = [&](const std::string& flag, const auto& value) {
      call.push_back(fmt::format("--{}={}", flag, value));
    };
    if (chance(0.3)) t["dlse"] = normal_array(DType::float32, {b, hq, sq}, source);
    if (chance(0.3)) {
      t["bias"] = normal_array(chance(0.5) ? dtype : DType::float32, pair_shape(), source);
      if (chance(0.5)) call.emplace_back("--dbias");
    }
    if (chance(0.3)) t["mask"] = booleans(pair_shape(), 0.7);
    if (chance(0.3)) t["alibi_slopes"] = normal_array(DType::float32, {hq}, source);
    if (chance(0.3)) {
      t["sinks"] = normal_array(DType::float32, {hq}, source);
      if (chance(0.5)) call.emplace_back("--dsinks");
    }
    if (chance(0.3)) {
      const std::int64_t block_q = integer(1, 16), block_k = integer(1, 16);
      t["block_mask"] = booleans({1, 1, (sq + block_q - 1) / block_q, (sk + block_k - 1) / block_k}, 0.6);
      add("block-q", block_q);
      add("block-k", block_k);
    }
    if (chance(0.4)) call.emplace_back(chance(0.7) ? "--causal" : "--causal=top_left");
    if (chance(0.3)) add("window-left", integer(-3, 20));
    if (chance(0.3)) add("window-right", integer(-3, 20));
    if (chance(0.3)) add("scale", source.next() * 0.3);
    if (chance(0.3)) add("softcap", 1.0 + std::abs(source.next()) * 10.0);
    if (chance(0.3)) {
      add("dropout-p", 0.4);
      add("seed", generator());
    }
    if (chance(0.3)) call.emplace_back("--batch-invariant");
    if (chance(0.3)) add("threads", integer(1, 3));
    write(t);
    const CommandResult result = run(call);
    ASSERT_EQ(result.code, 0) << fmt::format("round {}: {}\n", round, fmt::join(call, " ")) << result.out << result.err;
  }
}

}  // namespace
}  // namespace headrace::tool
