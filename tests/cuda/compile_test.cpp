// From a KernelSource to a cubin, without a GPU.
#include <gmock/gmock.h>

#include <list>
#include <map>
#include <string>
#include <vector>

#include "cuda/driver/cubin.hpp"
#include "cuda/driver/digest.hpp"
#include "cuda/driver/precompiled.hpp"
#include "cuda/standard_set.hpp"
#include "describe/problem.hpp"
#include "test_kernels.hpp"

namespace headrace::cuda {
namespace {

using test::scale_kernel;
using testing::HasSubstr;

const std::string hopper(standard_architecture);

std::string error_of(const KernelSource& source) {
  try {
    compile(source, hopper);
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status, HR_ERROR_RUNTIME);
    return failure.what();
  }
  return "";
}

// FIPS 180-4's examples, and every length around the end of a block.
TEST(Digest, IsSha256) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_EQ(sha256(std::string(55, 'a')), "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(sha256(std::string(56, 'a')), "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  EXPECT_EQ(sha256(std::string(64, 'a')), "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
}

TEST(KernelSource, NamesItself) {
  EXPECT_EQ(name_of({"forward", "f.cuh", {}}), "forward");
  EXPECT_EQ(name_of(scale_kernel(-3)), "scale<FACTOR=-3, THREADS=128>");
  EXPECT_EQ(name_of(scale_kernel(0)), "scale<THREADS=128>");
}

TEST(KernelSource, ReachesWhatItIncludes) {
  std::vector<std::string> names;
  for (const SourceFile& file : sources_of(scale_kernel(2))) names.emplace_back(file.name);
  EXPECT_THAT(names, testing::ElementsAre("test/scale.cuh", "test/offset.cuh", "tiling/tiling.hpp"));
}

TEST(KernelSource, DigestChangesWithAllThatMatters) {
  const std::string digest = digest_of(scale_kernel(2), hopper);
  EXPECT_EQ(digest, digest_of(scale_kernel(2), hopper));
  EXPECT_NE(digest, digest_of(scale_kernel(3), hopper));
  EXPECT_NE(digest, digest_of(scale_kernel(2), "sm_80"));
  KernelSource other = scale_kernel(2);
  other.entry = "other";
  EXPECT_NE(digest, digest_of(other, hopper));

  // The same file names with another text in a file that is only included.
  static constexpr SourceFile one[] = {{"one/root.cuh", "#include \"one/part.cuh\"\n"}, {"one/part.cuh", "int a;"}};
  static constexpr SourceFile two[] = {{"two/root.cuh", "#include \"two/part.cuh\"\n"}, {"two/part.cuh", "int b;"}};
  add_sources(one);
  add_sources(two);
  EXPECT_NE(digest_of({"k", "one/root.cuh", {}}, hopper), digest_of({"k", "two/root.cuh", {}}, hopper));
}

TEST(KernelSource, NamesAFileThatIsNotThere) {
  EXPECT_THAT(error_of({"k", "absent.cuh", {}}), HasSubstr("absent.cuh is not part of the library"));
  static constexpr SourceFile files[] = {{"astray.cuh", "  # include \"ptx/nowhere.cuh\"\n"}};
  add_sources(files);
  EXPECT_THAT(error_of({"k", "astray.cuh", {}}), HasSubstr("ptx/nowhere.cuh, which astray.cuh includes"));
}

TEST(Nvrtc, CompilesForEveryArchitectureAndSign) {
  HEADRACE_NEEDS_NVRTC();
  for (const char* architecture : {"sm_80", "sm_90a", "sm_100a"})
    for (const long long factor : {-3, 0, 1 << 20})
      EXPECT_FALSE(compile(scale_kernel(factor), architecture).cubin.empty()) << architecture << ' ' << factor;
}

TEST(Nvrtc, ErrorsCarryTheLog) {
  HEADRACE_NEEDS_NVRTC();
  static constexpr SourceFile files[] = {{"wrong.cuh", "\nint x = nonsense;\n"}};
  add_sources(files);
  const std::string error = error_of({"k", "wrong.cuh", {}});
  EXPECT_THAT(error, HasSubstr("cannot compile wrong.cuh"));
  EXPECT_THAT(error, HasSubstr("wrong.cuh(2): error"));
  EXPECT_THAT(error, HasSubstr("nonsense"));
}

TEST(Nvrtc, AWrongOptionIsAnError) {
  HEADRACE_NEEDS_NVRTC();
  try {
    compile(scale_kernel(1), "sm_1");
    FAIL() << "sm_1 was accepted";
  } catch (const Failure& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("NVRTC_ERROR_INVALID_OPTION"));
  }
}

// The headers that host and device share, all templates and functions that their tests instantiate.
TEST(Nvrtc, CompilesTheSharedHeaders) {
  HEADRACE_NEEDS_NVRTC();
  static constexpr SourceFile files[] = {{"shared.cuh", R"(
#include "describe/dropout.hpp"
#include "headrace/streaming.hpp"
#include "tiling/tiling.hpp"
extern "C" __global__ void shared(float* x, const headrace::Visibility* v, headrace::Dropout d) {
  headrace::SoftmaxState<float> softmax;
  softmax.update(x[0]);
  headrace::Moments<float> moments;
  moments.update(x[1]);
  headrace::TopK<float, 4> top;
  top.update(x[2], 0);
  const bool kept = v->visible(threadIdx.x, 3) && d.keep(0, 1, 2, 3);
  x[3] = kept ? softmax.finalize().lse + moments.finalize().mean : 0;
}
)"}};
  add_sources(files);
  EXPECT_EQ(error_of({"shared", "shared.cuh", {}}), "");
}

TEST(Nvrtc, TellsOfSerialisedTensorCoreInstructions) {
  HEADRACE_NEEDS_NVRTC();
  EXPECT_THAT(compile(KernelSource{"serialized", "test/serialized.cuh", {}}, hopper).log, HasSubstr("are serialized"));
  EXPECT_EQ(compile(KernelSource{"wgmma", "test/wgmma.cuh", {}}, hopper).log, "");
}

// What is read from the ELF file against what ptxas prints.
TEST(Cubin, SaysWhatPtxasSays) {
  HEADRACE_NEEDS_NVRTC();
  const std::vector<KernelSource> kernels = {
      scale_kernel(3, 256), {"wgmma", "test/wgmma.cuh", {}}, {"spill", "test/spill.cuh", {}}};
  for (const KernelSource& kernel : kernels) {
    SCOPED_TRACE(name_of(kernel));
    const Compiled compiled = compile(kernel, hopper, true);
    const CubinReport report = inspect_cubin(compiled.cubin, kernel.entry);
    EXPECT_THAT(compiled.log, HasSubstr("Used " + std::to_string(report.registers) + " registers"));
    EXPECT_THAT(compiled.log, HasSubstr(std::to_string(report.stack_bytes) + " bytes stack frame"));
    EXPECT_EQ(report.stack_bytes > 0, kernel.entry == "spill");
    EXPECT_EQ(report.dynamic_shared, kernel.entry == "scale" ? 1024 : 0);
  }
}

TEST(Cubin, RefusesWhatIsNone) {
  EXPECT_THROW(inspect_cubin("", "k"), Failure);
  EXPECT_THROW(inspect_cubin(std::string(200, 'x'), "k"), Failure);
  HEADRACE_NEEDS_NVRTC();
  const std::string cubin = compile(scale_kernel(1), hopper).cubin;
  EXPECT_THROW(inspect_cubin(cubin, "another"), Failure);
  for (std::size_t bytes = 0; bytes < cubin.size(); bytes += 97) {
    try {  // cut anywhere, it may be refused or not, but nothing outside it is read
      inspect_cubin(std::string(cubin, 0, bytes), "scale");
    } catch (const Failure&) {
    }
  }
}

TEST(Pack, ReturnsWhatWasPutIn) {
  const std::map<std::string, std::string> cubins = {
      {"d1", std::string("a\n\nb\0c", 6)}, {"d2", ""}, {"d3", std::string(5000, 'z')}};
  static const std::string pack = write_pack(cubins);
  const PrecompiledSize before = precompiled_size();
  add_pack(pack);
  for (const auto& [digest, cubin] : cubins) EXPECT_EQ(find_precompiled(digest), cubin);
  EXPECT_EQ(find_precompiled("d4"), std::nullopt);
  EXPECT_EQ(precompiled_size().kernels, before.kernels + 3);
  EXPECT_EQ(precompiled_size().bytes, before.bytes + 5006);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{20}, pack.size() - 1}) {
    static std::list<std::string> kept;
    kept.push_back(pack.substr(0, bytes));
    EXPECT_THROW(add_pack(kept.back()), Failure) << bytes;
  }
}

}  // namespace
}  // namespace headrace::cuda
