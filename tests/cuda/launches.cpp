#include "launches.hpp"

#include <algorithm>
#include <iterator>
#include <memory>
#include <span>

namespace headrace::test {
namespace {

// dsinks may lie in memory with gaps.
Call with_contiguous_results(Call call) {
  if (call.dsinks.present()) call.dsinks = Array(DType::float32, call.dsinks.shape());
  return call;
}

}  // namespace

Spec launch_spec(DType dtype, std::int64_t seqlen, std::int64_t dim, Causal causal) {
  Spec spec = dense_spec(dtype, seqlen, seqlen, dim);
  spec.batch = 2, spec.heads_kv = 2, spec.group = 4;
  spec.causal = causal;
  return spec;
}

Launch::Launch(const Spec& spec, const GpuStream& stream, Pass pass) : Launch(make_call(spec), stream, pass) {}

Launch::Launch(Call call, const GpuStream& stream, Pass pass)
    : stream_(stream), call_(with_contiguous_results(std::move(call))), pass_(pass), on_gpu_(call_, stream.get()) {
  on_gpu_.upload();
  if (pass == Pass::forward) return;
  forward(on_gpu_.attention());
  stream.synchronize(call_.spec.describe());
}

std::vector<Array Call::*> Launch::outputs() const {
  if (pass_ == Pass::forward) return {&Call::out};
  std::vector<Array Call::*> all = {&Call::dq, &Call::dk, &Call::dv};
  for (Array Call::*optional : {&Call::dbias, &Call::dsinks})
    if ((call_.*optional).present()) all.push_back(optional);
  return all;
}

template <typename F>
void Launch::for_each_output(F&& visit) const {
  for (Array Call::*output : outputs()) {
    const Array& array = call_.*output;
    const std::ptrdiff_t at = static_cast<std::byte*>(array.view().data) - array.storage().data();
    visit(on_gpu_.address_of(array) + static_cast<CUdeviceptr>(at),
          static_cast<std::size_t>(array.size() * size_of(array.dtype())));
  }
}

void Launch::poison() const {
  for_each_output([&](CUdeviceptr address, std::size_t bytes) {
    check(driver().cuMemsetD8Async(address, 0xFF, bytes, stream_.get()), "cuMemsetD8Async");
  });
}

void Launch::launch(const Attention& attention) const {
  if (pass_ == Pass::forward)
    forward(attention);
  else
    backward(attention);
}

std::vector<std::byte> Launch::bits() const {
  std::vector<std::byte> result;
  for_each_output([&](CUdeviceptr address, std::size_t bytes) {
    result.resize(result.size() + bytes);
    check(driver().cuMemcpyDtoHAsync(result.data() + result.size() - bytes, address, bytes, stream_.get()),
          "cuMemcpyDtoHAsync");
  });
  stream_.synchronize(call_.spec.describe());
  return result;
}

std::vector<std::byte> Launch::run() const {
  poison();
  launch();
  return bits();
}

std::vector<std::byte> Launch::run(const Plan& plan, const GpuWorkspace& workspace) const {
  poison();
  plan.execute(attention(), workspace.span());
  return bits();
}

std::string Launch::judge(int threads) {
  const Passes passes = pass_ == Pass::forward ? Passes::forward : Passes::both;
  Outcome outcome{.results = {}, .failure = on_gpu_.download(pass_)};
  outcome.results = results_in(call_, passes);
  return test::judge(call_, outcome, exact_on_cpu(call_, threads, passes), passes);
}

std::string bits_that_differ(const std::vector<std::byte>& got, const std::vector<std::byte>& expected) {
  if (got == expected) return "";
  std::size_t different = 0;
  for (std::size_t i = 0; i + 1 < std::min(got.size(), expected.size()); i += 2)
    different += got[i] != expected[i] || got[i + 1] != expected[i + 1];
  return std::to_string(different) + " of " + std::to_string(expected.size() / 2) + " pairs of bytes differ";
}

void expect_to_work_without_a_context(const Spec& spec, Pass pass) {
  std::unique_ptr<GpuStream> stream;
  std::unique_ptr<Launch> launch;
  std::vector<std::byte> bits;
  {
    const ContextScope scope(0);
    stream = std::make_unique<GpuStream>();
    launch = std::make_unique<Launch>(spec, *stream, pass);
    bits = launch->run();
    launch->poison();
    stream->synchronize("poison");
  }
  cuda::CUcontext current = nullptr;
  check(driver().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  ASSERT_EQ(current, nullptr);
  launch->attention().stream = nullptr;
  launch->launch();
  check(driver().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  EXPECT_EQ(current, nullptr);
  const ContextScope scope(0);
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
  EXPECT_EQ(bits_that_differ(launch->bits(), bits), "");
  launch.reset();
  stream.reset();
}

void expect_to_refuse_host_memory(const Spec& spec, Pass pass) {
  struct Field {
    const char* name;
    Tensor Attention::*tensor;
  };
  constexpr Field fields[] = {{"q", &Attention::q},          {"k", &Attention::k},
                              {"v", &Attention::v},          {"out", &Attention::out},
                              {"lse", &Attention::lse},      {"bias", &Attention::bias},
                              {"mask", &Attention::mask},    {"alibi_slopes", &Attention::alibi_slopes},
                              {"sinks", &Attention::sinks},  {"block_mask", &Attention::block_mask},
                              {"dout", &Attention::dout},    {"dlse", &Attention::dlse},
                              {"dq", &Attention::dq},        {"dk", &Attention::dk},
                              {"dv", &Attention::dv},        {"dbias", &Attention::dbias},
                              {"dsinks", &Attention::dsinks}};
  constexpr std::size_t of_forward = 10;
  const ContextScope scope(0);
  const GpuStream stream;
  const Launch launch(spec, stream, pass);
  const std::vector<std::byte> bits = launch.run();
  alignas(64) static std::byte host[4096];
  for (const Field& field : std::span(fields).first(pass == Pass::forward ? of_forward : std::size(fields))) {
    Attention attention = launch.attention();
    if ((attention.*field.tensor).data == nullptr) continue;
    (attention.*field.tensor).data = host;
    const hr_attention a = attention.c();
    EXPECT_EQ(pass == Pass::forward ? hr_forward(&a) : hr_backward(&a), HR_ERROR_VALUE) << field.name;
    const std::string error = hr_last_error();
    EXPECT_TRUE(error.starts_with(std::string(field.name) + ": is at 0x")) << error;
    EXPECT_NE(error.find("which is not memory of CUDA device 0"), std::string::npos) << error;
  }
  EXPECT_EQ(bits_that_differ(launch.run(), bits), "");
}

void BusyStream::run() const {
  try {
    const ContextScope scope(0);
    const GpuStream stream;
    Spec spec = launch_spec(DType::bfloat16, 1100, 128, Causal::none);
    spec.batch = 1;
    const Launch work(spec, stream);
    while (!stop_) {
      for (int n = 0; n < 20; ++n) work.launch();
      stream.synchronize("the busy stream");
    }
  } catch (const std::exception& error) {
    ADD_FAILURE() << "the busy stream: " << error.what();
  }
}

Graph::Graph(const GpuStream& stream, cuda::CUstreamCaptureMode mode, const std::function<void()>& work)
    : stream_(stream) {
  check(driver().cuStreamBeginCapture(stream.get(), mode), "cuStreamBeginCapture");
  try {
    work();
  } catch (const Error& thrown) {
    error_ = thrown.what();
  }
  check(driver().cuStreamEndCapture(stream.get(), &graph_), "cuStreamEndCapture");
  if (error_.empty()) check(driver().cuGraphInstantiate(&executable_, graph_, 0), "cuGraphInstantiate");
}
Graph::~Graph() {
  if (executable_ != nullptr) driver().cuGraphExecDestroy(executable_);
  if (graph_ != nullptr) driver().cuGraphDestroy(graph_);
}
void Graph::replay() const { check(driver().cuGraphLaunch(executable_, stream_.get()), "cuGraphLaunch"); }

}  // namespace headrace::test
