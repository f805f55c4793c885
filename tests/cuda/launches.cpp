#include "launches.hpp"

#include <algorithm>

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
