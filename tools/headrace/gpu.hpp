// A CUDA device as the tools use it: memory, streams, times; by the driver that the library opens at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "array.hpp"
#include "cuda/driver/context.hpp"
#include "headrace/headrace.hpp"

namespace headrace::tool {

// What --device says: "cpu", "cuda" (the first one) or "cuda:N". Throws UsageError.
std::optional<int> parse_device(const std::string& text);

// Makes a device current in this thread for as long as it lives. Throws std::runtime_error that says what is missing
// where there is no driver or no such device.
class Gpu {
 public:
  explicit Gpu(int index);
  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] std::string name() const;

 private:
  int index_;
  std::optional<cuda::ContextScope> context_;
};

// The classes below need a Gpu that lives longer.
class GpuMemory {
 public:
  explicit GpuMemory(std::size_t bytes);
  explicit GpuMemory(const std::vector<std::byte>& bytes);  // holds a copy
  ~GpuMemory();
  GpuMemory(GpuMemory&& other) noexcept;
  GpuMemory& operator=(GpuMemory&&) = delete;
  // The driver's addresses are numbers. NOLINTNEXTLINE(performance-no-int-to-ptr)
  [[nodiscard]] std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  // Fills bytes from `offset` on. Waits for the device first.
  void read(std::vector<std::byte>& bytes, std::size_t offset = 0) const;

 private:
  cuda::CUdeviceptr address_ = 0;
};

class GpuStream {
 public:
  GpuStream();
  ~GpuStream();
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;
  [[nodiscard]] cuda::CUstream get() const { return stream_; }
  void synchronize() const;
  // How long the device takes for what `work` queues on this stream, from its first to its last operation.
  [[nodiscard]] double seconds_of(const std::function<void()>& work) const;

 private:
  cuda::CUstream stream_ = nullptr;
  cuda::CUevent begin_ = nullptr, end_ = nullptr;
};

// Work that a stream captured: launching it costs the host one call, whatever it holds.
class GpuGraph {
 public:
  GpuGraph(const GpuStream& stream, const std::function<void()>& work);
  ~GpuGraph();
  GpuGraph(GpuGraph&& other) noexcept;
  GpuGraph& operator=(GpuGraph&&) = delete;
  void launch(const GpuStream& stream) const;

 private:
  cuda::CUgraphExec executable_ = nullptr;
};

// The tensors of a call on the device; lengths stay on the host, where the library reads them.
class GpuTensors {
 public:
  explicit GpuTensors(const Tensors& tensors);
  // As bind_tensors, with memory of the device; sets device and stream too.
  void bind(Attention& attention, const Gpu& gpu, const GpuStream& stream) const;
  // Copies a tensor back.
  void read(const std::string& name, Array& array) const { memory_.at(name).read(array.bytes); }

 private:
  const Tensors& tensors_;
  std::map<std::string, GpuMemory> memory_;
};

// A plan of a pass with its workspace, to be executed on tensors of the device.
class GpuPass {
 public:
  GpuPass(const Attention& attention, Pass pass);
  void operator()() const;
  [[nodiscard]] const Plan& plan() const { return plan_; }

 private:
  Attention attention_;
  Plan plan_;
  GpuMemory workspace_;
};

}  // namespace headrace::tool
