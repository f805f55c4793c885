// How the backward pass is launched: deterministic calls give the same bits every time, whatever runs beside them; on
// streams, in graphs, from threads; plans; what is refused.
#include <gmock/gmock.h>

#include <array>
#include <string>

#include "accuracy.hpp"
#include "launches.hpp"
#include "spot_check.hpp"

namespace headrace::test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

Spec deterministic_spec(DType dtype, std::int64_t seqlen, std::int64_t dim, Causal causal) {
  Spec spec = launch_spec(dtype, seqlen, dim, causal);
  spec.deterministic = true;
  return spec;
}

void add_every_option(Spec& spec) {
  spec.bias.present = spec.mask.present = spec.blocks.present = spec.dbias = spec.dsinks = spec.dlse = true;
  spec.bias.full = {false, true, true, true};
  spec.blocks.block_q = spec.blocks.block_k = 64;
  spec.blocks.hidden = 0.2;
  spec.alibi = Alibi::heads;
  spec.sinks = Sinks::normal;
}

class BackwardLaunch : public OnGpu {
 protected:
  // That `count` launches give the same bits, and those are right where the reference can say. Every other one finds in
  // its workspace what the one before left there.
  static void expect_same_bits(const Spec& spec, int count, bool judged) {
    const ContextScope scope(0);
    const GpuStream stream;
    Launch launch(spec, stream, Pass::backward);
    const Plan plan(launch.attention(), Pass::backward);
    const GpuWorkspace workspace(plan.workspace_bytes());
    const std::vector<std::byte> first = launch.run(plan, workspace);
    if (judged) {
      EXPECT_EQ(launch.judge(1), "") << spec.describe();
    }
    for (int n = 1; n < count; ++n) {
      const std::string difference = bits_that_differ(launch.run(plan, workspace), first);
      if (difference.empty()) continue;
      ADD_FAILURE() << "launch " << n << ": " << difference << ": " << spec.describe();
      break;
    }
    EXPECT_EQ(workspace.judge(Pass::backward), "") << spec.describe();
  }
};

// -- determinism --

TEST_F(BackwardLaunch, TheSameBitsAThousandTimesBesideABusyStream) {
  const BusyStream busy;
  Spec wide = dense_spec(DType::float16, 1024, 1024, 64);
  wide.batch = 2, wide.heads_kv = 12;
  Spec grouped = dense_spec(DType::bfloat16, 2048, 2048, 128);
  grouped.heads_kv = 2, grouped.group = 8;
  Spec causal = grouped;
  causal.causal = Causal::bottom_right;
  for (Spec spec : {wide, grouped, causal}) {
    spec.deterministic = true;
    expect_same_bits(spec, scaled(1000), false);
  }
}

// All at the same time: blocks of threads that wait for others share the GPU with blocks that wait, too.
TEST_F(BackwardLaunch, TheSameBitsAThousandTimesBesideEachOther) {
  std::vector<Spec> specs = {deterministic_spec(DType::bfloat16, 520, 128, Causal::bottom_right),
                             deterministic_spec(DType::float16, 700, 64, Causal::none),
                             deterministic_spec(DType::bfloat16, 400, 256, Causal::bottom_right),
                             deterministic_spec(DType::float16, 333, 96, Causal::none),
                             deterministic_spec(DType::float32, 300, 128, Causal::bottom_right),
                             deterministic_spec(DType::bfloat16, 300, 64, Causal::none)};
  specs[1].window_left = 100;
  specs[3].group = 8;
  specs[2].bias.present = specs[2].dbias = true;
  specs[2].bias.full = {false, false, true, true};
  add_every_option(specs[5]);
  Rng rng = test_rng();
  for (int n = 0; n < 6; ++n) {
    Spec spec = deterministic_spec(rng.pick({DType::bfloat16, DType::float16, DType::float32}), rng.integer(100, 800),
                                   rng.pick<std::int64_t>({64, 64, 128, 128, 80, 192, 256}),
                                   rng.pick({Causal::none, Causal::bottom_right, Causal::top_left}));
    spec.seed = rng.bits();
    spec.seqlen_k = rng.integer(100, 1500);
    spec.heads_kv = rng.integer(1, 3), spec.group = rng.integer(1, 8);
    if (rng.chance(0.3)) spec.window_left = rng.integer(0, 300), spec.window_right = rng.integer(0, 300);
    if (rng.chance(0.3)) spec.dropout_p = 0.1;
    if (rng.chance(0.3)) spec.softcap = 15.0;
    if (rng.chance(0.3)) spec.sinks = Sinks::normal, spec.dsinks = true;
    spec.dlse = rng.chance(0.5);
    if (rng.chance(0.5)) {
      spec.bias.present = spec.dbias = true;
      for (bool& full : spec.bias.full) full = rng.chance(0.5);
    }
    specs.push_back(spec);
  }
  in_parallel(specs.size(), [&](std::size_t n) { expect_same_bits(specs[n], scaled(1000), true); });
}

// More blocks of keys for each head than there are multiprocessors: whoever waits must wait for what is running.
TEST_F(BackwardLaunch, MoreBlocksOfKeysThanMultiprocessors) {
  std::vector<Spec> specs;
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const auto& [seqlen_q, heads] : {std::pair<std::int64_t, std::int64_t>{40000, 1}, {700, 3}, {64, 8}}) {
      for (const Causal causal : {Causal::none, Causal::bottom_right}) {
        if (dtype == DType::float16 && seqlen_q > 1000) continue;
        specs.push_back(dense_spec(dtype, seqlen_q, 40000, 64));
        specs.back().heads_kv = heads;
        specs.back().causal = causal;
        specs.back().deterministic = true;
      }
    }
  }
  in_parallel(specs.size(), [&](std::size_t n) {
    const Spec& spec = specs[n];
    Call call = make_call(spec);
    const Outcome outcome = run_on_gpu(call, Passes::both);
    EXPECT_EQ(outcome.failure, "") << spec.describe();
    if (!outcome.failure.empty()) return;
    EXPECT_EQ(spot_check(call, outcome.results, 48, 3.0 * contract_of(spec.dtype)), "") << spec.describe();
    const Outcome again = run_on_gpu(call, Passes::both);
    for (std::vector<double> Results::*member : {&Results::dq, &Results::dk, &Results::dv})
      EXPECT_TRUE(again.results.*member == outcome.results.*member) << spec.describe();
  });
}

TEST_F(BackwardLaunch, MoreBlocksOfKeysThanMultiprocessorsBesideEachOther) {
  const BusyStream busy;
  std::vector<Spec> specs;
  for (const std::int64_t dim : {64, 128, 256}) {
    specs.push_back(dense_spec(DType::bfloat16, 300, 20000, dim));
    specs.back().heads_kv = 3;
    specs.back().deterministic = true;
  }
  in_parallel(specs.size(), [&](std::size_t n) { expect_same_bits(specs[n], scaled(20), false); });
}

// -- streams, graphs, threads --

// Everything that the pass does is in the order of its stream: its inputs are there only after a long time.
TEST_F(BackwardLaunch, WaitsForWhatIsBeforeItOnItsStream) {
  const ContextScope scope(0);
  const GpuStream stream;
  const Launch long_work(launch_spec(DType::bfloat16, 4096, 128, Causal::none), stream);
  std::vector<Spec> specs;
  for (const std::int64_t dim : {64, 128, 100, 256}) {
    for (const DType dtype : dtypes) {
      specs.push_back(deterministic_spec(dtype, 300, dim, Causal::bottom_right));
      if (dim == 64) add_every_option(specs.back());
    }
  }
  load_variants(specs, Passes::both);
  for (const Spec& spec : specs) {
    const Launch launch(spec, stream, Pass::backward);
    const std::vector<std::byte> expected = launch.run();
    const Plan plan(launch.attention(), Pass::backward);
    const GpuWorkspace workspace(plan.workspace_bytes());
    const CUdeviceptr memory = launch.on_gpu().address();
    const std::size_t bytes = launch.on_gpu().bytes();
    const GpuMemory saved(bytes);
    check(driver().cuMemcpyDtoDAsync(saved.address(), memory, bytes, stream.get()), "cuMemcpyDtoDAsync");
    for (const bool planned : {false, true}) {
      check(driver().cuMemsetD8Async(memory, 0xFF, bytes, stream.get()), "cuMemsetD8Async");
      stream.synchronize("poison");
      for (int n = 0; n < 20; ++n) long_work.launch();
      check(driver().cuMemcpyDtoDAsync(memory, saved.address(), bytes, stream.get()), "cuMemcpyDtoDAsync");
      launch.poison();
      if (planned)
        plan.execute(launch.attention(), workspace.span());
      else
        launch.launch();
      EXPECT_EQ(bits_that_differ(launch.bits(), expected), "") << (planned ? "planned " : "") << spec.describe();
    }
  }
}

TEST_F(BackwardLaunch, AGraphGivesTheSameBits) {
  const ContextScope scope(0);
  const GpuStream stream;
  for (const cuda::CUstreamCaptureMode mode :
       {cuda::CU_STREAM_CAPTURE_MODE_GLOBAL, cuda::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        cuda::CU_STREAM_CAPTURE_MODE_RELAXED}) {
    for (const bool planned : {true, false}) {  // without a plan the graph allocates the workspace itself
      Spec spec = deterministic_spec(mode == cuda::CU_STREAM_CAPTURE_MODE_GLOBAL ? DType::bfloat16 : DType::float16,
                                     300, mode == cuda::CU_STREAM_CAPTURE_MODE_RELAXED ? 64 : 128,
                                     planned ? Causal::bottom_right : Causal::none);
      if (mode == cuda::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) add_every_option(spec);
      Launch launch(spec, stream, Pass::backward);
      const Plan plan(launch.attention(), Pass::backward);
      const GpuWorkspace workspace(plan.workspace_bytes());
      launch.poison();
      stream.synchronize("poison");
      const Graph graph(stream, mode, [&] {
        if (planned)
          plan.execute(launch.attention(), workspace.span());
        else
          launch.launch();
      });
      ASSERT_EQ(graph.error(), "");
      const std::vector<std::byte> direct = launch.run();
      for (int replay = 0; replay < 3; ++replay) {
        launch.poison();
        graph.replay();
        EXPECT_EQ(bits_that_differ(launch.bits(), direct), "") << "replay " << replay << ": " << spec.describe();
      }
      EXPECT_EQ(launch.judge(), "") << spec.describe();
      EXPECT_EQ(workspace.judge(Pass::backward), "") << spec.describe();
    }
  }
}

// Where the order of sums is free, a replay is right all the same: what a launch needs cleared is cleared each time.
TEST_F(BackwardLaunch, AGraphOfACallThatIsNotDeterministic) {
  const ContextScope scope(0);
  const GpuStream stream;
  for (const std::int64_t dim : {64, 128, 256}) {
    Launch launch(launch_spec(DType::bfloat16, 300, dim, Causal::bottom_right), stream, Pass::backward);
    const Plan plan(launch.attention(), Pass::backward);
    const GpuWorkspace workspace(plan.workspace_bytes());
    const Graph graph(stream, cuda::CU_STREAM_CAPTURE_MODE_GLOBAL,
                      [&] { plan.execute(launch.attention(), workspace.span()); });
    ASSERT_EQ(graph.error(), "");
    for (int replay = 0; replay < 3; ++replay) {
      launch.poison();
      graph.replay();
      stream.synchronize("a replay");
      EXPECT_EQ(launch.judge(), "") << "replay " << replay << ": " << launch.call().spec.describe();
    }
  }
}

// Threads share one plan and execute it on tensors and workspaces of their own.
TEST_F(BackwardLaunch, OnePlanForManyThreads) {
  for (const std::int64_t dim : {64, 128, 256}) {
    const ContextScope scope(0);
    const GpuStream stream;
    const Spec spec = deterministic_spec(DType::bfloat16, 300, dim, Causal::bottom_right);
    const Launch planned(spec, stream, Pass::backward);
    const Plan plan(planned.attention(), Pass::backward);
    in_parallel(4, [&](std::size_t t) {
      const ContextScope again(0);
      const GpuStream own;
      Spec other = spec;
      other.seed = mix(spec.seed, t);
      Launch launch(other, own, Pass::backward);
      const GpuWorkspace workspace(plan.workspace_bytes());
      const std::vector<std::byte> first = launch.run(plan, workspace);
      for (int n = 0; n < 20; ++n) plan.execute(launch.attention(), workspace.span());
      own.synchronize(other.describe());
      EXPECT_EQ(bits_that_differ(launch.bits(), first), "") << other.describe();
      EXPECT_EQ(launch.judge(1), "") << other.describe();
      EXPECT_EQ(workspace.judge(Pass::backward), "") << other.describe();
    });
  }
}

TEST_F(BackwardLaunch, WorksWithoutACurrentContextAndOnTheDefaultStream) {
  expect_to_work_without_a_context(deterministic_spec(DType::float16, 260, 128, Causal::none), Pass::backward);
}

// -- what is refused, and what it needs --

TEST_F(BackwardLaunch, RefusesMemoryOfTheHost) {
  Spec spec = deterministic_spec(DType::bfloat16, 130, 64, Causal::none);
  add_every_option(spec);
  expect_to_refuse_host_memory(spec, Pass::backward);
}

// 16 heads of 128 over 65536 tokens: at most half as much again as dq in float32.
TEST_F(BackwardLaunch, WorkspaceIsBounded) {
  const Shape shape{1, 65536, 16, 128};
  for (const bool deterministic : {false, true}) {
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
      Attention attention;
      for (Tensor Attention::*tensor : {&Attention::q, &Attention::k, &Attention::v, &Attention::out, &Attention::dout,
                                        &Attention::dq, &Attention::dk, &Attention::dv})
        attention.*tensor = Tensor(nullptr, DType::bfloat16, shape);
      attention.lse = Tensor(nullptr, DType::float32, {1, 16, 65536});
      attention.causal = causal;
      attention.deterministic = deterministic;
      attention.device = Device::cuda;
      const Plan plan(attention, Pass::backward);
      const std::size_t dq_in_float32 = std::size_t{4} * 65536 * 16 * 128;
      EXPECT_LE(plan.workspace_bytes(), dq_in_float32 * 3 / 2)
          << (deterministic ? "deterministic " : "") << (causal == Causal::none ? "full" : "causal");
    }
  }
}

}  // namespace
}  // namespace headrace::test
