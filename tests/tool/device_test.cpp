// attend and bench with --device: what they say without a GPU, where a stand-in for the driver shows what happens with
// one, and their results where there is one.
#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>

#include "array.hpp"
#include "command.hpp"
#include "gpu.hpp"
#include "nlohmann/json.hpp"
#include "run_command.hpp"
#include "safetensors.hpp"

namespace headrace::tool {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

class DeviceTest : public CommandTest {
 protected:
  [[nodiscard]] std::string input(const Shape& shape = {1, 70, 2, 64}) const {
    NormalSource source(5);
    Tensors tensors;
    for (const char* name : {"q", "k", "v"}) tensors[name] = normal_array(DType::bfloat16, shape, source);
    const std::string file = path("in.safetensors");
    write_safetensors(file, {{"q", &tensors["q"]}, {"k", &tensors["k"]}, {"v", &tensors["v"]}}, {});
    return file;
  }
  void expect_error(const std::vector<std::string>& arguments, int code, const std::string& text) const {
    const CommandResult result = run(arguments);
    EXPECT_EQ(result.code, code) << result.out;
    EXPECT_THAT(result.err, HasSubstr("headrace: error: " + text));
  }
};

TEST(Device, IsParsed) {
  EXPECT_EQ(parse_device("cpu"), std::nullopt);
  EXPECT_EQ(parse_device("cuda"), 0);
  EXPECT_EQ(parse_device("cuda:0"), 0);
  EXPECT_EQ(parse_device("cuda:12"), 12);
  for (const char* text : {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda:99999999999", "CUDA"})
    EXPECT_THROW(static_cast<void>(parse_device(text)), UsageError) << text;
}

// The commands find the stand-in in place of a driver.
class FakeDevice : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    setenv("LD_LIBRARY_PATH", HEADRACE_FAKE_DRIVER, 1);
    setenv("HEADRACE_CACHE_DIR", "off", 1);
    if (std::filesystem::exists(HEADRACE_TEST_NVRTC)) setenv("HEADRACE_NVRTC", HEADRACE_TEST_NVRTC, 0);
  }
  void TearDown() override {
    unsetenv("LD_LIBRARY_PATH");
    unsetenv("HEADRACE_FAKE_DRIVER");
    DeviceTest::TearDown();
  }
};

TEST_F(FakeDevice, ThatIsNotThereIsAnError) {
  const std::string file = input();
  expect_error({"attend", file, "--check", "--device", "cuda:2"}, exit_failure,
               "--device: is cuda:2; this machine has 2 CUDA devices");
  expect_error({"bench", "--device", "cuda:2"}, exit_failure, "--device: is cuda:2; this machine has 2 CUDA devices");
  setenv("HEADRACE_FAKE_DRIVER", "no device", 1);
  expect_error({"attend", file, "--check", "--device", "cuda"}, exit_failure, "GPU: the CUDA driver sees no device");
  expect_error({"bench", "--device", "cuda"}, exit_failure, "GPU: the CUDA driver sees no device");
}

TEST_F(FakeDevice, RefusesWhatItCannotDo) {
  expect_error({"attend", input(), "--check", "--device", "gpu"}, exit_usage,
               "--device: is gpu; it must be cpu, cuda or cuda:N");
  expect_error({"attend", input(), "--check", "--device", "cuda", "--dtype", "float64"}, exit_failure,
               "q: dtype is float64; on CUDA it must be");
}

// Nothing computes there, so that zeros come back; but they do come back.
TEST_F(FakeDevice, GetsTheTensorsAndGivesThemBack) {
  const CommandResult result = run({"attend", input(), "-o", path("out"), "--device", "cuda:1", "--json"});
  if (result.err.find("NVRTC") != std::string::npos) GTEST_SKIP() << result.err;
  ASSERT_EQ(result.code, exit_ok) << result.err;
  const Json report = Json::parse(result.out);
  EXPECT_EQ(report["device"], "Fake 1");
  EXPECT_GT(report["seconds"]["forward"], 0.0);
  SafetensorsReader file(path("out"));
  EXPECT_EQ(file.read("out").shape, (Shape{1, 70, 2, 64}));
  EXPECT_EQ(file.read("lse").shape, (Shape{1, 2, 70}));
  EXPECT_EQ(run({"attend", input(), "--check", "--device", "cuda"}).code, exit_check_failed);
}

TEST_F(FakeDevice, IsMeasuredAlone) {
  const CommandResult result =
      run({"bench", "--dtype", "float16", "--device", "cuda", "--lengths", "32,64", "--repeats", "2", "--json", "-"});
  if (result.err.find("NVRTC") != std::string::npos) GTEST_SKIP() << result.err;
  ASSERT_EQ(result.code, exit_ok) << result.err;
  const Json report = Json::parse(result.out);
  EXPECT_EQ(report["device"], "Fake 0");
  ASSERT_EQ(report["rows"].size(), 2u);
  for (const Json& row : report["rows"]) {
    EXPECT_EQ(row["headrace"]["seconds_all"].size(), 2u);
    EXPECT_EQ(row["headrace"]["peak_bytes"], 0);
    EXPECT_EQ(row["standard"]["skipped"], "not on a GPU");
  }
}

class OnGpu : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    const CommandResult result = run({"attend", input(), "-o", path("out"), "--device", "cuda"});
    if (result.code == exit_failure) GTEST_SKIP() << result.err;
  }
};

TEST_F(OnGpu, AttendKeepsTheContract) {
  for (const Shape& shape : {Shape{2, 300, 4, 128}, Shape{1, 70, 3, 50}}) {  // rows of 50 elements are copied
    for (const char* dtype : {"bfloat16", "float16"}) {
      for (const char* causal : {"--causal=none", "--causal"}) {
        const CommandResult result =
            run({"attend", input(shape), "--check", "--device", "cuda", "--dtype", dtype, causal});
        EXPECT_EQ(result.code, exit_ok) << result.out << result.err;
      }
    }
  }
}

TEST_F(OnGpu, BenchIsRight) {
  const CommandResult result = run({"bench", "--dtype", "bfloat16", "--heads", "4", "--dim", "128", "--device", "cuda",
                                    "--lengths", "100,2048", "--causal", "--json", "-"});
  ASSERT_EQ(result.code, exit_ok) << result.err;
  for (const Json& row : Json::parse(result.out)["rows"]) EXPECT_LT(row["headrace"]["error"], 8e-3) << row;
}

}  // namespace
}  // namespace headrace::tool
