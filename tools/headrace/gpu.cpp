#include "gpu.hpp"

#include <charconv>
#include <utility>

#include "command.hpp"
#include "cuda/driver/devices.hpp"
#include "fmt/format.h"

namespace headrace::tool {

using cuda::check;
using cuda::driver;

std::optional<int> parse_device(const std::string& text) {
  if (text == "cpu") return std::nullopt;
  if (text == "cuda") return 0;
  constexpr std::string_view prefix = "cuda:";
  int index = -1;
  if (text.starts_with(prefix)) {
    const char* const end = text.data() + text.size();
    const auto [parsed, error] = std::from_chars(text.data() + prefix.size(), end, index);
    if (error == std::errc() && parsed == end && index >= 0) return index;
  }
  throw UsageError(fmt::format("--device: is {}; it must be cpu, cuda or cuda:N", text));
}

Gpu::Gpu(int index) : index_(index) {
  driver();  // says so where there is none
  const std::size_t count = cuda::list_devices().devices.size();
  if (static_cast<std::size_t>(index) >= count)
    throw std::runtime_error(
        fmt::format("--device: is cuda:{}; this machine has {} CUDA device{}", index, count, count == 1 ? "" : "s"));
  context_.emplace(index);
}

std::string Gpu::name() const { return cuda::list_devices().devices[static_cast<std::size_t>(index_)].name; }

GpuMemory::GpuMemory(std::size_t bytes) {
  if (bytes > 0) check(driver().cuMemAlloc(&address_, bytes), "cuMemAlloc");
}

GpuMemory::GpuMemory(const std::vector<std::byte>& bytes) : GpuMemory(bytes.size()) {
  if (bytes.empty()) return;
  check(driver().cuMemcpyHtoD(address_, bytes.data(), bytes.size()), "cuMemcpyHtoD");
  // The copy may still be on its way, and a stream of ours would not wait for it.
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
}

GpuMemory::~GpuMemory() {
  if (address_ != 0) driver().cuMemFree(address_);
}

GpuMemory::GpuMemory(GpuMemory&& other) noexcept : address_(std::exchange(other.address_, 0)) {}

void GpuMemory::read(std::vector<std::byte>& bytes, std::size_t offset) const {
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
  if (!bytes.empty()) check(driver().cuMemcpyDtoH(bytes.data(), address_ + offset, bytes.size()), "cuMemcpyDtoH");
}

GpuStream::GpuStream() {
  check(driver().cuStreamCreate(&stream_, cuda::CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  check(driver().cuEventCreate(&begin_, 0), "cuEventCreate");
  check(driver().cuEventCreate(&end_, 0), "cuEventCreate");
}

GpuStream::~GpuStream() {
  driver().cuEventDestroy(end_);
  driver().cuEventDestroy(begin_);
  driver().cuStreamDestroy(stream_);
}

void GpuStream::synchronize() const { check(driver().cuStreamSynchronize(stream_), "cuStreamSynchronize"); }

double GpuStream::seconds_of(const std::function<void()>& work) const {
  check(driver().cuEventRecord(begin_, stream_), "cuEventRecord");
  work();
  check(driver().cuEventRecord(end_, stream_), "cuEventRecord");
  check(driver().cuEventSynchronize(end_), "cuEventSynchronize");
  float milliseconds = 0;
  check(driver().cuEventElapsedTime(&milliseconds, begin_, end_), "cuEventElapsedTime");
  return 1e-3 * static_cast<double>(milliseconds);
}

GpuGraph::GpuGraph(const GpuStream& stream, const std::function<void()>& work) {
  check(driver().cuStreamBeginCapture(stream.get(), cuda::CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
  work();
  cuda::CUgraph graph = nullptr;
  check(driver().cuStreamEndCapture(stream.get(), &graph), "cuStreamEndCapture");
  const cuda::CUresult result = driver().cuGraphInstantiate(&executable_, graph, 0);
  driver().cuGraphDestroy(graph);
  check(result, "cuGraphInstantiate");
}

GpuGraph::~GpuGraph() {
  if (executable_ != nullptr) driver().cuGraphExecDestroy(executable_);
}

GpuGraph::GpuGraph(GpuGraph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}

void GpuGraph::launch(const GpuStream& stream) const {
  check(driver().cuGraphLaunch(executable_, stream.get()), "cuGraphLaunch");
}

GpuTensors::GpuTensors(const Tensors& tensors) : tensors_(tensors) {
  for (const auto& [name, array] : tensors)
    if (array.dtype != DType::int32) memory_.emplace(name, array.bytes);
}

void GpuTensors::bind(Attention& attention, const Gpu& gpu, const GpuStream& stream) const {
  bind_tensors(attention, tensors_);
  for_each_tensor(attention, [&](const char* name, Tensor& tensor) {
    if (const auto found = memory_.find(name); found != memory_.end()) tensor.data = found->second.data();
  });
  attention.device = Device::cuda;
  attention.device_index = gpu.index();
  attention.stream = stream.get();
}

GpuPass::GpuPass(const Attention& attention, Pass pass)
    : attention_(attention), plan_(attention, pass), workspace_(plan_.workspace_bytes()) {}

void GpuPass::operator()() const { plan_.execute(attention_, {workspace_.data(), plan_.workspace_bytes()}); }

}  // namespace headrace::tool
