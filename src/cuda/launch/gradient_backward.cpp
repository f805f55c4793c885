// Launches backward_gradient.cuh: the backward pass of float32 problems.
#include <algorithm>
#include <deque>

#include "cuda/launch/backward_pass.hpp"
#include "cuda/launch/backward_source.hpp"
#include "cuda/launch/forward_params.hpp"

namespace headrace::cuda {
namespace {

class GradientBackward final : public BackwardPass {
 public:
  GradientBackward(const Problem& p, int multiprocessors)
      : BackwardPass(p, gradient_tile, true), multiprocessors_(multiprocessors) {
    plan(BackwardTarget::dq, p.dq, p.seqlen_q, p.heads_q, p.head_dim);
    plan(BackwardTarget::dk, p.dk, p.seqlen_k, p.heads_kv, p.head_dim);
    plan(BackwardTarget::dv, p.dv, p.seqlen_k, p.heads_kv, p.value_dim);
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
  void launch_gradients(const Buffers& buffers, std::byte* workspace, const ContextScope& context) const override {
    for (const Gradient& gradient : gradients_) {
      if (gradient.blocks == 0) continue;
      BackwardGradientParams params = gradient.params;
      set_pointers(params, buffers, workspace);
      params.to.to = gradient.target == BackwardTarget::dq   ? buffers.dq
                     : gradient.target == BackwardTarget::dk ? buffers.dk
                                                             : buffers.dv;
      void* arguments[] = {&params};
      launch(gradient.kernel.in(context), gradient.blocks, gradient_threads, buffers.stream, arguments);
    }
  }

 private:
  struct Gradient {
    explicit Gradient(const KernelSource& source) : kernel(source) {}
    PlannedKernel kernel;
    BackwardTarget target = BackwardTarget::dq;
    BackwardGradientParams params{};
    unsigned blocks = 0;
  };

  void plan(BackwardTarget target, const RowStrides& strides, std::int64_t rows, std::int64_t heads,
            std::int64_t columns) {
    const std::int64_t chunks = ceil_div(columns, gradient_columns(columns));
    const std::int64_t tiles = ceil_div(rows, gradient_tile) * chunks;
    Gradient& gradient = gradients_.emplace_back(backward_gradient_source(problem_, target, gradient_tile));
    gradient.kernel.load();
    gradient.target = target;
    gradient.blocks = static_cast<unsigned>(tiles * problem_.batch * heads);
    gradient.params = gradient_params();
    gradient.params.heads = divisor(heads);
    gradient.params.tiles = divisor(tiles);
    gradient.params.column_chunks = static_cast<int>(chunks);
    gradient.params.to = {.to = nullptr, .strides = by_row(strides), .columns = static_cast<int>(columns), .by_tma = 0};
  }

  std::deque<Gradient> gradients_;
  int multiprocessors_;
};

}  // namespace

std::unique_ptr<Kernel> make_gradient_backward(const Problem& p, int multiprocessors) {
  const ContextScope context(p.device_index);
  return std::make_unique<GradientBackward>(p, multiprocessors);
}

}  // namespace headrace::cuda
