// The CPU backend's kernels: runs the tasks of a plan on the threads of OpenMP.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "cpu/plans.hpp"
#include "cpu/targets.hpp"
#include "cpu/tile_config.hpp"
#include "describe/element.hpp"
#include "plan/kernel.hpp"

namespace headrace {
namespace {

int wanted_threads(const Problem& p) { return p.threads > 0 ? p.threads : std::max(1, omp_get_max_threads()); }

// No more threads than tasks, nor than the work is worth: waking a thread costs as much as some 10^5
// multiply-adds, and far more where other processes want its core.
int used_threads(const Problem& p, std::size_t tasks) {
  constexpr double worth_a_thread = 5e5;
  double work = 0;
  for (const Sequence& seq : p.sequences) {
    work += static_cast<double>(seq.q_len * p.heads_q) * static_cast<double>(seq.k_len * (p.head_dim + p.value_dim));
  }
  const double useful = std::min(static_cast<double>(tasks), work / worth_a_thread);
  return static_cast<int>(std::clamp(useful, 1.0, static_cast<double>(wanted_threads(p))));
}

// Hands out the numbers 0 ... count - 1 in order, each to one thread.
class Counter {
 public:
  explicit Counter(std::size_t count) : count_(count) {}
  bool next(std::size_t& index) {
    index = next_.fetch_add(1, std::memory_order_relaxed);
    return index < count_;
  }

 private:
  std::size_t count_;
  std::atomic<std::size_t> next_{0};
};

// Zeroes the rows of no sequence: [heads, rows, size] elements of the tensor at data.
void zero_rows(const std::vector<RowRange>& ranges, void* data, hr_dtype dtype, const RowStrides& strides, Index heads,
               Index size) {
  for (const RowRange& range : ranges) {
    for (Index row = range.begin; row < range.end; ++row) {
      for (Index h = 0; h < heads; ++h) fill_elements(data, dtype, strides.at(range.batch, row, h), size, 0.0);
    }
  }
}

class ForwardKernel final : public Kernel {
 public:
  explicit ForwardKernel(const Problem& p)
      : problem_(p),
        target_(cpu::chosen()),
        plan_(cpu::plan_forward(p, target_.table(), wanted_threads(p))),
        threads_(used_threads(p, plan_.tasks.size())) {}

  [[nodiscard]] std::size_t workspace_bytes() const override {
    return plan_.shared_bytes + static_cast<std::size_t>(threads_) * plan_.scratch_bytes;
  }

  [[nodiscard]] KernelReport report() const override {
    return {.name = (plan_.streams() ? "cpu.stream." : "cpu.forward.") + std::string(target_.name),
            .tile_q = cpu::tile_q,
            .tile_k = cpu::tile_k,
            .splits = plan_.splits,
            .tasks = static_cast<Index>(plan_.tasks.size()),
            .threads = threads_,
            .available_threads = wanted_threads(problem_),
            .key_reuse = plan_.key_reuse(),
            .fast_bytes = plan_.scratch_bytes,
            .notes = {}};
  }

  void execute(const Buffers& buffers, std::byte* workspace) const override {
    const cpu::KernelTable& kernels = target_.table();
    Counter packs(plan_.pack_tasks.size()), tasks(plan_.tasks.size());
    const std::size_t splits = static_cast<std::size_t>(plan_.splits);
    const std::size_t tiles = static_cast<std::size_t>(plan_.tiles_per_task);
    Counter merges(splits > 1 ? plan_.tasks.size() / splits * tiles : 0);
#pragma omp parallel num_threads(threads_)
    {
      const cpu::Workspace mine{.shared = workspace,
                                .scratch = workspace + plan_.shared_bytes +
                                           static_cast<std::size_t>(omp_get_thread_num()) * plan_.scratch_bytes};
      std::size_t index = 0;
      while (packs.next(index)) kernels.forward_pack(plan_, buffers, index, mine);
#pragma omp barrier
      while (tasks.next(index)) kernels.forward(plan_, buffers, plan_.task_in_turn(index), mine);
      if (plan_.splits > 1) {
#pragma omp barrier
        while (merges.next(index)) {
          const std::size_t task = index / tiles * splits, tile = index % tiles;
          if (tile < static_cast<std::size_t>(plan_.tasks[task].count))
            kernels.merge_splits(plan_, buffers, task, static_cast<Index>(tile), mine);
        }
      }
    }
    zero_rows(problem_.unused_q, buffers.out, problem_.dtype, problem_.out, problem_.heads_q, problem_.value_dim);
    if (!problem_.has_lse) return;
    for (const RowRange& range : problem_.unused_q) {
      for (Index h = 0; h < problem_.heads_q; ++h) {
        for (Index row = range.begin; row < range.end; ++row) {
          store_element(buffers.lse, problem_.lse_dtype, problem_.lse.at(range.batch, h, row),
                        -std::numeric_limits<double>::infinity());
        }
      }
    }
  }

 private:
  const Problem& problem_;
  const cpu::Target& target_;
  cpu::ForwardPlan plan_;
  int threads_;
};

class BackwardKernel final : public Kernel {
 public:
  explicit BackwardKernel(const Problem& p)
      : problem_(p),
        target_(cpu::chosen()),
        plan_(cpu::plan_backward(p, target_.table())),
        threads_(used_threads(p, std::max(plan_.tasks.size(), plan_.bias_tasks.size()))) {}

  [[nodiscard]] std::size_t workspace_bytes() const override {
    return plan_.shared_bytes + static_cast<std::size_t>(threads_) * plan_.scratch_bytes;
  }

  [[nodiscard]] KernelReport report() const override {
    return {.name = "cpu.backward." + std::string(target_.name),
            .tile_q = cpu::tile_q,
            .tile_k = plan_.tile_keys,
            .splits = 1,
            .tasks = static_cast<Index>(plan_.tasks.size() + plan_.bias_tasks.size()),
            .threads = threads_,
            .available_threads = wanted_threads(problem_),
            .key_reuse = 1,
            .fast_bytes = plan_.scratch_bytes,
            .notes = {}};
  }

  void execute(const Buffers& buffers, std::byte* workspace) const override {
    const Problem& p = problem_;
    const cpu::KernelTable& kernels = target_.table();
    const std::size_t heads = static_cast<std::size_t>(p.heads_q);
    const std::size_t sequence_heads = static_cast<std::size_t>(p.batch) * heads;
    Counter prepared(sequence_heads), tasks(plan_.tasks.size()), finished(plan_.dq_direct ? 0 : sequence_heads);
    Counter sinks(p.need_dsinks ? heads : 0), bias(plan_.bias_tasks.size());
#pragma omp parallel num_threads(threads_)
    {
      const cpu::Workspace mine{.shared = workspace,
                                .scratch = workspace + plan_.shared_bytes +
                                           static_cast<std::size_t>(omp_get_thread_num()) * plan_.scratch_bytes};
      const auto head = [&](std::size_t index) { return static_cast<Index>(index % heads); };
      const auto sequence = [&](std::size_t index) { return static_cast<Index>(index / heads); };
      std::size_t index = 0;
      while (prepared.next(index)) kernels.backward_prepare(plan_, buffers, sequence(index), head(index), mine);
#pragma omp barrier
      while (tasks.next(index)) kernels.backward(plan_, buffers, index, mine);
      while (bias.next(index)) kernels.backward_bias(plan_, buffers, index, mine);
      while (sinks.next(index)) kernels.backward_sinks(plan_, buffers, static_cast<Index>(index), mine);
#pragma omp barrier
      while (finished.next(index)) kernels.backward_finish(plan_, buffers, sequence(index), head(index), mine);
    }
    zero_rows(p.unused_q, buffers.dq, p.dtype, p.dq, p.heads_q, p.head_dim);
    zero_rows(p.unused_k, buffers.dk, p.dtype, p.dk, p.heads_kv, p.head_dim);
    zero_rows(p.unused_k, buffers.dv, p.dtype, p.dv, p.heads_kv, p.value_dim);
  }

 private:
  const Problem& problem_;
  const cpu::Target& target_;
  cpu::BackwardPlan plan_;
  int threads_;
};

}  // namespace

std::unique_ptr<Kernel> make_cpu_kernel(const Problem& problem) {
  if (problem.pass == Pass::backward) return std::make_unique<BackwardKernel>(problem);
  return std::make_unique<ForwardKernel>(problem);
}

}  // namespace headrace
