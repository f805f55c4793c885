// How the forward pass is launched: the same bits every time, on streams, in graphs, from threads; plans; what is
// refused.
#include <gmock/gmock.h>

#include <string>
#include <thread>

#include "cuda/launch/tma_input.hpp"
#include "launches.hpp"

namespace headrace::test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

class ForwardLaunch : public OnGpu {};

TEST_F(ForwardLaunch, TheSameBitsAThousandTimesBesideABusyStream) {
  const ContextScope scope(0);
  const BusyStream busy;
  const GpuStream stream;
  std::vector<Spec> specs = {
      launch_spec(DType::bfloat16, 520, 128, Causal::bottom_right), launch_spec(DType::float16, 700, 64, Causal::none),
      launch_spec(DType::bfloat16, 400, 256, Causal::bottom_right), launch_spec(DType::float16, 333, 96, Causal::none),
      launch_spec(DType::float32, 300, 128, Causal::bottom_right)};
  specs[1].window_left = 100;
  specs[3].inputs = Inputs::one_key;  // some tiles are done twice
  for (const Spec& spec : specs) {
    const Launch launch(spec, stream);
    const std::vector<std::byte> first = launch.run();
    const int count = scaled(1000);
    for (int n = 1; n < count; ++n) {
      const std::string difference = bits_that_differ(launch.run(), first);
      if (difference.empty()) continue;
      ADD_FAILURE() << "launch " << n << ": " << difference << ": " << spec.describe();
      break;
    }
  }
}

TEST_F(ForwardLaunch, AGraphGivesTheSameBits) {
  const ContextScope scope(0);
  const GpuStream stream;
  for (const cuda::CUstreamCaptureMode mode :
       {cuda::CU_STREAM_CAPTURE_MODE_GLOBAL, cuda::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        cuda::CU_STREAM_CAPTURE_MODE_RELAXED}) {
    SCOPED_TRACE(static_cast<int>(mode));
    // A kernel that has not been loaded yet, each time.
    Launch launch(launch_spec(mode == cuda::CU_STREAM_CAPTURE_MODE_GLOBAL ? DType::bfloat16 : DType::float16, 300,
                              mode == cuda::CU_STREAM_CAPTURE_MODE_RELAXED ? 64 : 128, Causal::bottom_right),
                  stream);
    launch.poison();
    stream.synchronize("poison");
    const Graph graph(stream, mode, [&] { launch.launch(); });
    ASSERT_EQ(graph.error(), "");
    const std::vector<std::byte> direct = launch.run();
    for (int replay = 0; replay < 3; ++replay) {
      launch.poison();
      graph.replay();
      EXPECT_TRUE(launch.bits() == direct) << "replay " << replay << ": " << launch.call().spec.describe();
    }
    EXPECT_EQ(launch.judge(), "") << launch.call().spec.describe();
  }
}

TEST_F(ForwardLaunch, TwoThreadsAtOnce) {
  const Spec specs[] = {launch_spec(DType::bfloat16, 500, 128, Causal::none),
                        launch_spec(DType::float16, 450, 64, Causal::bottom_right)};
  std::vector<std::thread> workers;
  for (const Spec& spec : specs)
    workers.emplace_back([&spec] {
      const ContextScope scope(0);
      const GpuStream stream;
      Launch launch(spec, stream);
      const std::vector<std::byte> first = launch.run();
      EXPECT_EQ(launch.judge(), "") << spec.describe();
      int different = 0;
      for (int n = 0; n < 300; ++n) different += launch.run() == first ? 0 : 1;
      EXPECT_EQ(different, 0) << spec.describe();
    });
  for (std::thread& worker : workers) worker.join();
}

// Threads share one plan and execute it on tensors of their own.
TEST_F(ForwardLaunch, OnePlanForManyThreads) {
  const ContextScope scope(0);
  const GpuStream stream;
  const Spec spec = launch_spec(DType::bfloat16, 300, 128, Causal::bottom_right);
  const Launch planned(spec, stream);
  const Plan plan(planned.attention(), Pass::forward);
  EXPECT_EQ(plan.workspace_bytes(), 0u);
  std::vector<std::thread> workers;
  for (std::uint64_t t = 0; t < 4; ++t)
    workers.emplace_back([&, t] {
      const ContextScope again(0);
      const GpuStream own;
      Spec other = spec;
      other.seed = mix(spec.seed, t);
      Launch launch(other, own);
      for (int n = 0; n < 20; ++n) plan.execute(launch.attention(), {});
      own.synchronize(other.describe());
      EXPECT_EQ(launch.judge(), "") << other.describe();
    });
  for (std::thread& worker : workers) worker.join();
}

// One scale must not be taken for another where everything else is the same.
TEST_F(ForwardLaunch, EachCallHasItsOwnOptions) {
  const ContextScope scope(0);
  const GpuStream stream;
  Launch launch(launch_spec(DType::bfloat16, 200, 64, Causal::none), stream);
  const auto with_scale = [&](double scale) {
    launch.attention().scale = scale;
    return launch.run();
  };
  const std::vector<std::byte> one = with_scale(1.0), half = with_scale(0.5), again = with_scale(1.0);
  EXPECT_FALSE(one == half);
  EXPECT_TRUE(one == again);
}

TEST_F(ForwardLaunch, WorksWithoutACurrentContextAndOnTheDefaultStream) {
  expect_to_work_without_a_context(launch_spec(DType::float16, 260, 128, Causal::none), Pass::forward);
}

TEST_F(ForwardLaunch, RefusesMemoryOfTheHost) {
  Spec spec = launch_spec(DType::bfloat16, 130, 64, Causal::none);
  spec.bias.present = spec.mask.present = spec.blocks.present = true;
  spec.blocks.block_q = spec.blocks.block_k = 64;
  spec.alibi = Alibi::heads;
  spec.sinks = Sinks::normal;
  expect_to_refuse_host_memory(spec, Pass::forward);
}

// The copy of an input that TMA cannot read has the same elements, so the result has the same bits.
TEST_F(ForwardLaunch, CopiedInputsGiveTheSameBits) {
  const ContextScope scope(0);
  const GpuStream stream;
  for (const std::int64_t dim : {64, 40, 256}) {
    const Spec spec = launch_spec(DType::bfloat16, 300, dim, Causal::bottom_right);
    const Launch in_place(spec, stream);
    const std::vector<std::byte> bits = in_place.run();
    for (Layout Spec::*layout : {&Spec::q_layout, &Spec::k_layout, &Spec::v_layout}) {
      for (const Layout copied : {Layout::padded, Layout::reversed}) {
        Spec other = spec;
        other.*layout = copied;
        Call call = make_call(other);
        for (Array Call::*array : {&Call::q, &Call::k, &Call::v}) (call.*array).fill((in_place.call().*array).values());
        const Launch launch(std::move(call), stream);
        EXPECT_TRUE(launch.run() == bits) << other.describe();
      }
    }
    const Launch launch(spec, stream);
    for (Tensor Attention::*tensor : {&Attention::q, &Attention::k, &Attention::v}) {
      Attention attention = launch.attention();
      Tensor& t = attention.*tensor;
      const auto bytes = static_cast<std::size_t>(t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3] * 2);
      const GpuMemory shifted(bytes + 2);
      check(
          driver().cuMemcpyDtoDAsync(shifted.address() + 2, reinterpret_cast<CUdeviceptr>(t.data), bytes, stream.get()),
          "cuMemcpyDtoDAsync");
      t.data = reinterpret_cast<void*>(shifted.address() + 2);
      launch.poison();
      launch.launch(attention);
      EXPECT_TRUE(launch.bits() == bits) << spec.describe();
    }
  }
}

// Elements of 4 bytes, which the forward pass has no kernel for yet, and more rows than a launch has warps.
TEST_F(ForwardLaunch, CopiesRowsOf32Bits) {
  const ContextScope scope(0);
  const GpuStream stream;
  constexpr std::int64_t batch = 3, rows = 4001, heads = 5, size = 3, pitch = 8;
  std::vector<std::uint32_t> from(batch * rows * heads * size), to(batch * rows * heads * pitch);
  for (std::size_t n = 0; n < from.size(); ++n) from[n] = static_cast<std::uint32_t>(n * 2654435761U);
  const GpuMemory source(4 * from.size());
  check(driver().cuMemcpyHtoD(source.address(), from.data(), 4 * from.size()), "cuMemcpyHtoD");
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
  std::size_t bytes = 0;
  // The last row comes first.
  const cuda::RowsOfHeads view{batch, rows, heads, size, {rows * heads * size, -heads * size, size}};
  const cuda::TmaInput input("k", view, HR_FLOAT32, 64, true, bytes);
  ASSERT_EQ(bytes, 4 * to.size());
  const GpuWorkspace workspace(bytes);
  const CUdeviceptr last_row = source.address() + 4 * (rows - 1) * heads * size;
  static_cast<void>(input.map(reinterpret_cast<void*>(last_row), workspace.span().data(), stream.get(), scope));
  stream.synchronize("a copy");
  EXPECT_EQ(workspace.judge(), "");
  check(driver().cuMemcpyDtoH(to.data(), reinterpret_cast<CUdeviceptr>(workspace.span().data()), bytes),
        "cuMemcpyDtoH");
  std::size_t wrong = 0;
  for (std::int64_t n = 0; n < batch * rows * heads * size; ++n) {
    const std::int64_t i = n % size, h = n / size % heads, r = n / (size * heads) % rows, b = n / (size * heads * rows);
    const std::int64_t copied = ((b * rows + rows - 1 - r) * heads + h) * pitch + i;
    wrong += to[static_cast<std::size_t>(copied)] == from[static_cast<std::size_t>(n)] ? 0 : 1;
  }
  EXPECT_EQ(wrong, 0u);
}

// With a plan and its workspace, and without: then the graph allocates the workspace itself.
TEST_F(ForwardLaunch, AGraphCopiesInputs) {
  const ContextScope scope(0);
  const GpuStream stream;
  const Spec spec = launch_spec(DType::float16, 300, 100, Causal::bottom_right);
  Launch launch(spec, stream);
  const std::vector<std::byte> direct = launch.run();
  const Plan plan(launch.attention(), Pass::forward);
  EXPECT_GT(plan.workspace_bytes(), 0u);
  const GpuWorkspace workspace(plan.workspace_bytes());
  for (const bool planned : {true, false}) {
    SCOPED_TRACE(planned ? "planned" : "not planned");
    const Graph graph(stream, cuda::CU_STREAM_CAPTURE_MODE_GLOBAL, [&] {
      if (planned)
        plan.execute(launch.attention(), workspace.span());
      else
        launch.launch();
    });
    ASSERT_EQ(graph.error(), "");
    for (int replay = 0; replay < 3; ++replay) {
      launch.poison();
      graph.replay();
      EXPECT_TRUE(launch.bits() == direct) << "replay " << replay << ": " << spec.describe();
    }
  }
  EXPECT_EQ(workspace.judge(), "");
  EXPECT_EQ(launch.judge(), "") << spec.describe();
}

}  // namespace
}  // namespace headrace::test
