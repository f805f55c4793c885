// What a backend gives the planner: a kernel for one validated problem.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "describe/problem.hpp"

namespace headrace {

// What explain says of a kernel, beside what follows from the problem alone.
struct KernelReport {
  std::string name;               // e.g. "cpu.forward.avx512"
  std::string worker = "thread";  // what runs a task at a time
  std::int64_t tile_q = 0, tile_k = 0;
  std::int64_t splits = 1;         // parts into which the keys of a row are split, merged as states
  std::int64_t tasks = 0;          // independent pieces of work
  int threads = 1;                 // workers that will work,
  int available_threads = 1;       // of those that might
  std::int64_t key_reuse = 1;      // query tiles that share one reading of a key tile
  std::size_t fast_bytes = 0;      // cache (CPU) or shared memory (GPU) that one task works in
  double flops_per_byte = 20;      // where arithmetic and memory balance; of a core of today's CPUs: 2 x 256-bit fused
                                   // multiply-adds at 3 GHz against a share of 5 GB/s
  std::vector<std::string> notes;  // why a faster kernel was not chosen, one sentence each
};

using Workspace = std::unique_ptr<std::byte, std::function<void(std::byte*)>>;

class Kernel {
 public:
  virtual ~Kernel() = default;
  [[nodiscard]] virtual std::size_t workspace_bytes() const = 0;
  [[nodiscard]] virtual KernelReport report() const = 0;
  // Memory for one execute on this stream, which may be freed as soon as that returns; null where none is needed. What
  // the calls without a plan use.
  [[nodiscard]] virtual Workspace allocate_workspace(void* stream) const;
  // Allocates nothing. Only a device may fail: it throws Failure then. workspace: workspace_bytes() bytes, 64-byte
  // aligned.
  virtual void execute(const Buffers& buffers, std::byte* workspace) const = 0;
};

// The problem must outlive the kernel.
std::unique_ptr<Kernel> make_reference_kernel(const Problem& problem);
std::unique_ptr<Kernel> make_cpu_kernel(const Problem& problem);
std::unique_ptr<Kernel> make_cuda_kernel(const Problem& problem);

}  // namespace headrace
