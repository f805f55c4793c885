// Launches whose bits are compared, what may run beside them, and graphs of them.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "on_gpu.hpp"

namespace headrace::test {

// Two batch entries of eight heads, four of which share keys.
Spec launch_spec(DType dtype, std::int64_t seqlen, std::int64_t dim, Causal causal);

// One pass of a call on the device; before a backward pass the forward pass has run. The results are contiguous, so
// that their bits are copies: of a forward pass, out.
class Launch {
 public:
  Launch(const Spec& spec, const GpuStream& stream, Pass pass = Pass::forward);
  Launch(Call call, const GpuStream& stream, Pass pass = Pass::forward);

  [[nodiscard]] const Call& call() const { return call_; }
  [[nodiscard]] const Attention& attention() const { return on_gpu_.attention(); }
  [[nodiscard]] Attention& attention() { return on_gpu_.attention(); }
  [[nodiscard]] const GpuCall& on_gpu() const { return on_gpu_; }

  // Sets the results to NaN, in the order of the stream.
  void poison() const;
  // Queues the pass.
  void launch() const { launch(on_gpu_.attention()); }
  void launch(const Attention& attention) const;
  // Waits for the stream.
  [[nodiscard]] std::vector<std::byte> bits() const;
  // All three; with a plan if one is given.
  [[nodiscard]] std::vector<std::byte> run() const;
  [[nodiscard]] std::vector<std::byte> run(const Plan& plan, const GpuWorkspace& workspace) const;
  // Of the bits that a run gave; the reference has so many threads, 0: as many as there are processors.
  [[nodiscard]] std::string judge(int threads = 0);

 private:
  [[nodiscard]] std::vector<Array Call::*> outputs() const;
  template <typename F>
  void for_each_output(F&& visit) const;

  const GpuStream& stream_;
  Call call_;
  Pass pass_;
  GpuCall on_gpu_;
};

// Says how two runs differ; "" if they do not.
std::string bits_that_differ(const std::vector<std::byte>& got, const std::vector<std::byte>& expected);

// That a pass gives the same bits on the default stream where no context is current, and leaves none behind.
void expect_to_work_without_a_context(const Spec& spec, Pass pass);

// That a pass refuses memory of the host in the place of each tensor that is present, names the tensor, and writes
// nothing.
void expect_to_refuse_host_memory(const Spec& spec, Pass pass);

// Forward passes on a stream of its own until it ends. Few tiles, so that it shares the multiprocessors with others
// instead of waiting for them.
class BusyStream {
 public:
  BusyStream() : thread_([this] { run(); }) {}
  ~BusyStream() {
    stop_ = true;
    thread_.join();
  }
  BusyStream(const BusyStream&) = delete;
  BusyStream& operator=(const BusyStream&) = delete;

 private:
  void run() const;

  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// What a stream captures while `work` runs.
class Graph {
 public:
  Graph(const GpuStream& stream, cuda::CUstreamCaptureMode mode, const std::function<void()>& work);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  [[nodiscard]] const std::string& error() const { return error_; }  // of work; empty if it went well
  void replay() const;

 private:
  const GpuStream& stream_;
  std::string error_;
  cuda::CUgraph graph_ = nullptr;
  cuda::CUgraphExec executable_ = nullptr;
};

}  // namespace headrace::test
