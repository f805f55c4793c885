#include <omp.h>

#include "plan/kernel.hpp"
#include "reference/passes.hpp"

namespace headrace {
namespace {

// Threads cost more than they bring where a pass takes a millisecond, as in the thousands of small problems
// of a randomized test.
int choose_threads(const Problem& p) {
  double pairs = 0.0;
  for (const Sequence& s : p.sequences) pairs += static_cast<double>(s.q_len) * static_cast<double>(s.k_len);
  const double multiply_adds = pairs * static_cast<double>(p.heads_q) * static_cast<double>(p.head_dim + p.value_dim);
  if (multiply_adds < 4e6) return 1;
  return p.threads > 0 ? p.threads : omp_get_max_threads();
}

class ReferenceKernel final : public Kernel {
 public:
  explicit ReferenceKernel(const Problem& problem)
      : problem_(problem), threads_(choose_threads(problem)), workspace_(problem, threads_) {}

  [[nodiscard]] std::size_t workspace_bytes() const override { return workspace_.bytes(); }

  [[nodiscard]] KernelReport report() const override {
    const bool is_forward = problem_.pass == Pass::forward;
    KernelReport report;
    report.name = is_forward ? "reference.forward" : "reference.backward";
    report.tile_q = 1;
    report.tile_k = problem_.seqlen_k;
    report.tasks =
        is_forward ? problem_.batch * problem_.heads_q * problem_.seqlen_q : problem_.batch * problem_.heads_kv;
    report.threads = threads_;
    report.fast_bytes = workspace_.bytes_per_thread();
    return report;
  }

  void execute(const Buffers& buffers, std::byte* workspace) const override {
    double* base = reinterpret_cast<double*>(workspace);
    if (problem_.pass == Pass::forward) {
      reference::forward(problem_, buffers, workspace_, base, threads_);
    } else {
      reference::backward(problem_, buffers, workspace_, base, threads_);
    }
  }

 private:
  const Problem& problem_;
  int threads_;
  reference::Workspace workspace_;
};

}  // namespace

std::unique_ptr<Kernel> make_reference_kernel(const Problem& problem) {
  return std::make_unique<ReferenceKernel>(problem);
}

}  // namespace headrace
