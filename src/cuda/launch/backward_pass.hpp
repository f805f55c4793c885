// What the backward passes of all types share: what they know of the rows before they begin, and the gradients of sinks
// and of the bias.
#pragma once

#include <optional>

#include "cuda/kernels/hopper_backward_params.hpp"
#include "cuda/launch/cuda_kernel.hpp"

namespace headrace::cuda {

HopperForwardParams::Strides3 by_row(const RowStrides& strides);
HopperForwardParams::Strides3 by_head(const Problem::LseStrides& strides);
// Whether every row of 16-bit elements begins at a multiple of 16 bytes.
bool rows_are_aligned(const void* data, const RowStrides& strides);

// All that can be known of the kernels' arguments without the pointers of a call is made when planning.
class BackwardPass : public CudaKernel {
 public:
  // queries: of a tile of the statistics. dbias_apart: whether its gradient, where it is wanted, is made here, and not
  // by launch_gradients(). Loads the kernels: a context of the device must be current.
  BackwardPass(const Problem& problem, int queries, bool dbias_apart);

  [[nodiscard]] std::size_t workspace_bytes() const final { return workspace_bytes_; }
  void execute(const Buffers& buffers, std::byte* workspace) const final;

 protected:
  // dq, dk and dv; statistics are in the workspace. Called if there are queries or keys.
  virtual void launch_gradients(const Buffers& buffers, std::byte* workspace, const ContextScope& context) const = 0;
  // What launch_statistics() sets to 0: dq_floats of each query tile, and the counters. Null: nothing is.
  struct Zeroed {
    float* dq = nullptr;
    int dq_floats = 0;
    int *turns = nullptr, *tickets = nullptr;
  };
  [[nodiscard]] virtual Zeroed zeroed(std::byte* /*workspace*/) const { return {}; }

  // Takes room in the workspace, aligned to 128 bytes; returns where.
  std::size_t take(std::int64_t bytes);

  [[nodiscard]] std::int64_t query_tiles() const { return query_tiles_; }  // of a head
  [[nodiscard]] std::int64_t all_query_tiles() const { return query_tiles_ * problem_.batch * problem_.heads_q; }
  [[nodiscard]] float* statistics_in(std::byte* workspace) const;
  // What the options and lengths say; all but the pointers.
  [[nodiscard]] const HopperForwardParams& options() const { return options_; }
  // All but what is summed, and where to, and the pointers.
  [[nodiscard]] BackwardGradientParams gradient_params() const;
  void set_pointers(BackwardGradientParams& params, const Buffers& buffers, std::byte* workspace) const;

  std::size_t workspace_bytes_ = 0;

 private:
  void plan_statistics();
  void plan_bias(int queries);

  void launch_statistics(const Buffers& buffers, std::byte* workspace, const ContextScope& context) const;
  void launch_sinks(const Buffers& buffers, std::byte* workspace, const ContextScope& context) const;
  void launch_bias(const Buffers& buffers, std::byte* workspace, const ContextScope& context) const;

  std::int64_t query_tiles_;
  HopperForwardParams options_{};
  PlannedKernel statistics_;
  std::optional<PlannedKernel> sinks_, bias_;  // where their gradients are wanted
  BackwardStatisticsParams statistics_params_{};
  BackwardGradientParams bias_params_{};
  unsigned bias_blocks_ = 0;
  std::size_t statistics_offset_;
};

}  // namespace headrace::cuda
