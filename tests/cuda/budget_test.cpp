// What every kernel of the standard set, and a sample of those that are compiled on demand, may use of the GPU:
// measured from the cubin, held against budget.txt. No GPU is needed.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cuda/driver/cubin.hpp"
#include "cuda/driver/precompiled.hpp"
#include "cuda/standard_set.hpp"
#include "on_demand_sample.hpp"
#include "sass.hpp"
#include "test_kernels.hpp"

namespace headrace::cuda {
namespace {

// The columns of budget.txt: all are at most, but tensor instructions and loops, of which there are at least so many.
struct Budget {
  int registers = 0, stack_bytes = 0, static_shared = 0, dynamic_shared = 0;
  int tensor_instructions = 0, tensor_loops = 0, local_accesses = 0, loop_local_accesses = 0;
};

// Whoever needs a kernel that is not precompiled waits for it. A quiet processor of 2024 takes less than 3 s for this
// many instructions; where there are more, something has been unrolled that should not have been. Processors differ, so
// the time itself is allowed three times as much.
constexpr int most_instructions = 12500;
constexpr double most_seconds = 9;

struct Measured {
  Budget used;
  int instructions = 0;
  double seconds = 0;  // of a processor, that the compiler took; 0 if it was not needed
  std::string error;
};

// That this thread has worked.
double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::string line_of(const Budget& b, const std::string& name) {
  return fmt::format("{:9} {:5} {:6} {:7} {:6} {:5} {:5} {:4}  {}", b.registers, b.stack_bytes, b.static_shared,
                     b.dynamic_shared, b.tensor_instructions, b.tensor_loops, b.local_accesses, b.loop_local_accesses,
                     name);
}

std::map<std::string, Budget> read_budgets() {
  std::map<std::string, Budget> budgets;
  std::ifstream file(HEADRACE_TEST_BUDGET);
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    Budget b;
    std::string name;
    words >> b.registers >> b.stack_bytes >> b.static_shared >> b.dynamic_shared >> b.tensor_instructions >>
        b.tensor_loops >> b.local_accesses >> b.loop_local_accesses >> std::ws;
    std::getline(words, name);
    EXPECT_TRUE(words && budgets.emplace(name, b).second) << "budget.txt: " << line;
  }
  return budgets;
}

Measured measure(const KernelSource& source) {
  const std::string architecture(standard_architecture);
  Measured measured;
  std::string cubin;
  if (const auto precompiled = find_precompiled(digest_of(source, architecture))) {
    cubin = *precompiled;
  } else {
    const double start = processor_seconds();
    const Compiled compiled = compile(source, architecture);
    measured.seconds = processor_seconds() - start;
    EXPECT_THAT(compiled.log, testing::Not(testing::HasSubstr("are serialized")));
    cubin = compiled.cubin;
  }
  const CubinReport report = inspect_cubin(cubin, source.entry);
  const SassReport sass = count_instructions(disassemble(cubin));
  measured.instructions = sass.instructions;
  measured.used = {.registers = report.registers,
                   .stack_bytes = report.stack_bytes,
                   .static_shared = report.static_shared,
                   .dynamic_shared = report.dynamic_shared,
                   .tensor_instructions = sass.tensor_instructions,
                   .tensor_loops = sass.tensor_loops,
                   .local_accesses = sass.local_accesses,
                   .loop_local_accesses = sass.loop_local_accesses};
  return measured;
}

std::vector<KernelSource> all_kernels() {
  std::vector<KernelSource> kernels = standard_set();
  for (KernelSource& kernel : on_demand_sample()) kernels.push_back(std::move(kernel));
  return kernels;
}

// On all cores: a kernel that is not in the library takes the compiler seconds.
std::vector<Measured> measure_all(const std::vector<KernelSource>& kernels) {
  std::vector<Measured> measured(kernels.size());
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < kernels.size(); i = next++) {
      try {
        measured[i] = measure(kernels[i]);
      } catch (const std::exception& error) {
        measured[i].error = error.what();
      }
    }
  };
  std::vector<std::thread> threads(std::max(1U, std::thread::hardware_concurrency()));
  for (std::thread& thread : threads) thread = std::thread(work);
  for (std::thread& thread : threads) thread.join();
  return measured;
}

// The kernels that took the compiler longest.
void print_compile_times(const std::vector<KernelSource>& kernels, const std::vector<Measured>& measured) {
  std::vector<std::size_t> order(kernels.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return measured[a].seconds > measured[b].seconds; });
  for (const std::size_t i : order)
    if (measured[i].seconds > 1)
      fmt::print("{:.1f} s, {:5} instructions: {}\n", measured[i].seconds, measured[i].instructions,
                 name_of(kernels[i]));
}

void expect_within(const Budget& used, const Budget& allowed) {
  EXPECT_LE(used.registers, allowed.registers);
  EXPECT_LE(used.stack_bytes, allowed.stack_bytes);
  EXPECT_LE(used.static_shared, allowed.static_shared);
  EXPECT_LE(used.dynamic_shared, allowed.dynamic_shared);
  EXPECT_GE(used.tensor_instructions, allowed.tensor_instructions);
  EXPECT_GE(used.tensor_loops, allowed.tensor_loops);
  EXPECT_LE(used.local_accesses, allowed.local_accesses);
  EXPECT_LE(used.loop_local_accesses, allowed.loop_local_accesses);
}

// Writes budget.txt anew where HEADRACE_TEST_WRITE_BUDGET is set: what to do after a change that is meant to cost.
void write_budgets(const std::vector<KernelSource>& kernels, const std::vector<Measured>& measured) {
  std::string text;
  {
    std::ifstream old(HEADRACE_TEST_BUDGET);
    for (std::string line; std::getline(old, line) && line.starts_with('#');) text += line + '\n';
  }
  for (std::size_t i = 0; i < kernels.size(); ++i) text += line_of(measured[i].used, name_of(kernels[i])) + '\n';
  std::ofstream(HEADRACE_TEST_BUDGET) << text;
}

TEST(Budget, IsKept) {
  HEADRACE_NEEDS_NVRTC();
  HEADRACE_SKIP_WITHOUT(!nvdisasm_path().empty(), "no nvdisasm: scripts/setup.sh test installs it");
  const std::vector<KernelSource> kernels = all_kernels();
  const std::size_t standard = standard_set().size();  // they come first
  const std::vector<Measured> measured = measure_all(kernels);
  if (std::getenv("HEADRACE_TEST_WRITE_BUDGET") != nullptr) write_budgets(kernels, measured);
  print_compile_times(kernels, measured);
  const std::map<std::string, Budget> budgets = read_budgets();
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    const std::string name = name_of(kernels[i]), line = line_of(measured[i].used, name);
    SCOPED_TRACE(measured[i].error.empty() ? "measured:\n" + line : name);
    EXPECT_EQ(measured[i].error, "");
    EXPECT_LE(measured[i].instructions, most_instructions);
    EXPECT_LE(measured[i].seconds, most_seconds);
    if (i < standard) {
      EXPECT_EQ(measured[i].used.loop_local_accesses, 0) << "a main loop spills";
    }
    const auto found = budgets.find(name);
    if (found == budgets.end())
      ADD_FAILURE() << "budget.txt has no line of it";
    else
      expect_within(measured[i].used, found->second);
  }
}

TEST(Budget, HasNoLineOfAKernelThatIsGone) {
  std::set<std::string> names;
  for (const KernelSource& kernel : all_kernels()) EXPECT_TRUE(names.insert(name_of(kernel)).second) << name_of(kernel);
  for (const auto& [name, budget] : read_budgets()) EXPECT_TRUE(names.contains(name)) << name;
}

// What no kernel of ours may do is seen where it is done.
TEST(Budget, SeesSpillsAndTensorInstructions) {
  HEADRACE_NEEDS_NVRTC();
  HEADRACE_SKIP_WITHOUT(!nvdisasm_path().empty(), "no nvdisasm: scripts/setup.sh test installs it");
  const Budget spill = measure({"spill", "test/spill.cuh", {}}).used;
  EXPECT_GT(spill.stack_bytes, 0);
  EXPECT_GT(spill.local_accesses, 0);
  EXPECT_EQ(spill.tensor_instructions, 0);
}

// A build with NVRTC has every kernel of the set in its pack, under the digest that a call looks for.
TEST(StandardSet, IsEmbedded) {
  if (!HEADRACE_TEST_PRECOMPILED) GTEST_SKIP() << "this build has no precompiled kernels";
  for (const KernelSource& kernel : standard_set())
    EXPECT_TRUE(find_precompiled(digest_of(kernel, std::string(standard_architecture)))) << name_of(kernel);
  EXPECT_EQ(precompiled_size().kernels, standard_set().size());
}

TEST(Sass, CountsWhatIsInTheLoops) {
  const SassReport report = count_instructions(R"(
  .text.kernel:
        /*0000*/                   STL [R1], R9 ;
.L_x_0:
        /*0010*/                   LDL R9, [R1] ;
.L_x_1:
        /*0020*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0030*/                   STL.64 [R1], R10 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/               @P0 BRA `(.L_x_0) ;
.L_x_2:
        /*0070*/                   LDL.LU R9, [R1] ;
.L_x_3:
        /*0080*/                   LDL R9, [R1] ;
        /*0090*/              @!P0 BRA `(.L_x_3) ;
        /*00a0*/                   EXIT ;
)");
  EXPECT_EQ(report.instructions, 11);
  EXPECT_EQ(report.tensor_instructions, 1);
  EXPECT_EQ(report.tensor_loops, 1);
  EXPECT_EQ(report.local_accesses, 5);
  EXPECT_EQ(report.loop_local_accesses, 1) << "only the innermost loop with a tensor instruction counts";
}

// The compiler moves what is rare to the end. It branches back from there, which is no loop; and what it moved out of
// a loop still belongs to it.
TEST(Sass, FollowsTheFlowAndNotTheOrder) {
  const SassReport report = count_instructions(R"(
        /*0000*/               @P0 BRA `(.L_x_3) ;
.L_x_0:
        /*0010*/                   LDL R9, [R1] ;
.L_x_1:
        /*0020*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0030*/                   BSSY B0, `(.L_x_2) ;
        /*0040*/                   BRA.DIV UR4, `(.L_x_4) ;
        /*0050*/                   BSYNC B0 ;
.L_x_2:
        /*0060*/               @P0 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   STL [R1], R9 ;
        /*0090*/                   BRA `(.L_x_0) ;
.L_x_4:
        /*00a0*/                   STL [R1+0x4], R9 ;
        /*00b0*/                   BSYNC B0 ;
.L_x_5:
        /*00c0*/                   BRA `(.L_x_5);
)");
  EXPECT_EQ(report.tensor_loops, 1);
  EXPECT_EQ(report.local_accesses, 3);
  EXPECT_EQ(report.loop_local_accesses, 1) << "the store at 00a0";
}

}  // namespace
}  // namespace headrace::cuda
