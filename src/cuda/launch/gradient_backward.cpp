// Launches backward_gradient.cuh: the backward pass of float32 problems.
#include <algorithm>
#include <array>

#include "cuda/driver/context.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/driver/module_cache.hpp"
#include "cuda/launch/backward_pass.hpp"
#include "cuda/launch/backward_source.hpp"
#include "cuda/launch/forward_params.hpp"

namespace headrace::cuda {
namespace {

class GradientBackward final : public BackwardPass {
 public:
  GradientBackward(const Problem& p, int multiprocessors)
      : BackwardPass(p, gradient_tile), multiprocessors_(multiprocessors) {
    for (const BackwardTarget target : targets) {
      sources_[static_cast<std::size_t>(target)] = backward_gradient_source(p, target, gradient_tile);
      load_kernel(sources_[static_cast<std::size_t>(target)]);  // compiled now, if it must be
    }
  }

  [[nodiscard]] KernelReport report() const override {
    const Problem& p = problem_;
    const std::int64_t tiles = all_query_tiles() + 2 * p.batch * p.heads_kv * ceil_div(p.seqlen_k, gradient_tile);
    return {.name = "cuda.backward_gradient",
            .worker = "SM",
            .tile_q = gradient_tile,
            .tile_k = gradient_tile,
            .splits = 1,
            .tasks = tiles,
            .threads = static_cast<int>(std::min<std::int64_t>(tiles, multiprocessors_)),
            .available_threads = multiprocessors_,
            .key_reuse = 1,
            .fast_bytes = std::size_t{2} * 64 * 36 * 4,
            .flops_per_byte = 17,  // H200: a sixth of 495 TFLOP/s of tf32 against 4.8 TB/s
            .notes = {"float32 is computed as six products of tf32; dq, dk and dv are made one after another, each "
                      "with scores of its own"}};
  }

 protected:
  void launch_gradients(const Buffers& buffers, std::byte* workspace) const override {
    const Problem& p = problem_;
    const auto launch_one = [&](BackwardTarget target, void* to, const RowStrides& strides, std::int64_t rows,
                                std::int64_t heads, std::int64_t columns) {
      const std::int64_t chunks = ceil_div(columns, gradient_columns(columns));
      const std::int64_t tiles = ceil_div(rows, gradient_tile) * chunks, all = tiles * p.batch * heads;
      if (all == 0) return;
      BackwardGradientParams params = gradient_params(buffers, workspace);
      params.heads = divisor(heads);
      params.tiles = divisor(tiles);
      params.column_chunks = static_cast<int>(chunks);
      params.to = {.to = to, .strides = by_row(strides), .columns = static_cast<int>(columns), .by_tma = 0};
      void* arguments[] = {&params};
      launch(load_kernel(sources_[static_cast<std::size_t>(target)]), static_cast<unsigned>(all), gradient_threads,
             buffers.stream, arguments);
    };
    launch_one(BackwardTarget::dq, buffers.dq, p.dq, p.seqlen_q, p.heads_q, p.head_dim);
    launch_one(BackwardTarget::dk, buffers.dk, p.dk, p.seqlen_k, p.heads_kv, p.head_dim);
    launch_one(BackwardTarget::dv, buffers.dv, p.dv, p.seqlen_k, p.heads_kv, p.value_dim);
  }

 private:
  static constexpr std::array targets = {BackwardTarget::dq, BackwardTarget::dk, BackwardTarget::dv};
  std::array<KernelSource, targets.size()> sources_;
  int multiprocessors_;
};

}  // namespace

std::unique_ptr<Kernel> make_gradient_backward(const Problem& p, int multiprocessors) {
  const ContextScope context(p.device_index);
  return std::make_unique<GradientBackward>(p, multiprocessors);
}

}  // namespace headrace::cuda
