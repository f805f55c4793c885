// The step of the build that compiles the standard set, with kernels of the tests.
#include "cuda/precompile/precompile.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cuda/driver/precompiled.hpp"
#include "cuda/standard_set.hpp"
#include "test_kernels.hpp"

namespace headrace::cuda {
namespace {

namespace fs = std::filesystem;
using test::scale_kernel;

class Precompile : public testing::Test {
 protected:
  void SetUp() override {
    HEADRACE_NEEDS_NVRTC();
    std::string pattern = (fs::temp_directory_path() / "headrace_precompile_XXXXXX").string();
    root_ = mkdtemp(pattern.data());
  }
  void TearDown() override {
    if (!root_.empty()) fs::remove_all(root_);
  }
  std::size_t run(const std::vector<KernelSource>& set) const {
    return precompile(set, (root_ / "store").string(), pack().string());
  }
  fs::path pack() const { return root_ / "pack"; }
  std::size_t stored() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(root_ / "store"), {}));
  }
  fs::path root_;
};

TEST_F(Precompile, CompilesOnlyWhatHasChanged) {
  const std::vector<KernelSource> set = {scale_kernel(1), scale_kernel(2), scale_kernel(3)};
  EXPECT_EQ(run(set), 3u);
  const auto written = fs::last_write_time(pack());
  EXPECT_EQ(run(set), 0u);
  EXPECT_EQ(fs::last_write_time(pack()), written) << "an unchanged pack is not written again";
  EXPECT_EQ(run({scale_kernel(1), scale_kernel(2), scale_kernel(4)}), 1u);
  EXPECT_EQ(stored(), 3u) << "what is in the set no more is removed";

  std::ifstream file(pack(), std::ios::binary);
  static const std::string bytes(std::istreambuf_iterator<char>(file), {});
  add_pack(bytes);
  for (const long long factor : {1, 2, 4})
    EXPECT_TRUE(find_precompiled(digest_of(scale_kernel(factor), std::string(standard_architecture))));
  EXPECT_FALSE(find_precompiled(digest_of(scale_kernel(3), std::string(standard_architecture))));
}

TEST_F(Precompile, AnEmptySetIsAPackWithNothing) {
  EXPECT_EQ(run({}), 0u);
  EXPECT_TRUE(fs::exists(pack()));
}

// The kernels that could be compiled are in the store when the error is corrected.
TEST_F(Precompile, AWrongKernelIsAnErrorAndKeepsTheOthers) {
  EXPECT_ANY_THROW(run({scale_kernel(1), {"absent", "test/absent.cuh", {}}, scale_kernel(2)}));
  EXPECT_FALSE(fs::exists(pack()));
  EXPECT_EQ(run({scale_kernel(1), scale_kernel(2)}), 0u);
}

TEST_F(Precompile, SerialisedTensorInstructionsAreAnError) {
  EXPECT_ANY_THROW(run({{"serialized", "test/serialized.cuh", {}}}));
  EXPECT_EQ(run({{"wgmma", "test/wgmma.cuh", {}}}), 1u);
}

TEST_F(Precompile, AKernelThatIsTwiceInTheSetIsAnError) { EXPECT_ANY_THROW(run({scale_kernel(1), scale_kernel(1)})); }

}  // namespace
}  // namespace headrace::cuda
