// Launches hopper_forward.cuh.
#include <algorithm>
#include <array>
#include <optional>

#include "cuda/driver/context.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/driver/module_cache.hpp"
#include "cuda/kernels/hopper_forward_params.hpp"
#include "cuda/launch/cuda_kernel.hpp"
#include "cuda/launch/forward_params.hpp"
#include "cuda/launch/hopper_forward_source.hpp"
#include "cuda/launch/tma_input.hpp"

namespace headrace::cuda {
namespace {

constexpr int rows_of_warp = 16;

class HopperForward final : public CudaKernel {
 public:
  HopperForward(const Problem& p, int multiprocessors)
      : CudaKernel(p),
        variant_(hopper_forward_variant(p, multiprocessors)),
        tile_(*variant_.tile),
        kernel_(hopper_forward_source(p, variant_)),
        multiprocessors_(multiprocessors),
        map_out_({p.batch, p.seqlen_q, p.heads_q, p.value_dim, p.out}, p.dtype, rows_of_warp) {
    check_size(p);
    params_ = forward_params(p, {.query_tiles = ceil_div(p.seqlen_q, tile_.rows()),
                                 .paired = variant_.paired,
                                 .value_chunks = 1,
                                 .most_blocks = multiprocessors * tile_.blocks_per_sm});
    // TMA writes 16 bytes at a time, behind the end of a row too.
    out_walkable_ =
        p.value_dim % 8 == 0 && tma_obstacle({p.batch, p.seqlen_q, p.heads_q, p.value_dim, p.out}, p.dtype).empty();
    if (blocks() == 0) return;
    const ContextScope context(p.device_index);
    kernel_.load();
    std::size_t number = 0;
    const auto input = [&](const char* name, std::int64_t rows, std::int64_t heads, std::int64_t size,
                           const RowStrides& strides, int box_rows, bool aligned) {
      inputs_[number++].emplace(name, RowsOfHeads{p.batch, rows, heads, size, strides}, p.dtype, box_rows, aligned,
                                workspace_bytes_);
    };
    input("q", p.seqlen_q, p.heads_q, p.head_dim, p.q, 64, p.q_aligned);
    if (p.seqlen_k == 0) return;
    input("k", p.seqlen_k, p.heads_kv, p.head_dim, p.k, tile_.keys, p.k_aligned);
    input("v", p.seqlen_k, p.heads_kv, p.value_dim, p.v, tile_.keys, p.v_aligned);
    if (!loads_bias(p, tile_)) return;
    const RowsOfHeads bias = pair_rows(p, p.bias);
    input("bias", bias.rows, bias.heads, bias.size, bias.strides, 64, p.bias_aligned);
  }

  [[nodiscard]] std::size_t workspace_bytes() const override { return workspace_bytes_; }

  [[nodiscard]] KernelReport report() const override {
    return {.name = "cuda.hopper_forward",
            .worker = "SM",
            .tile_q = tile_.rows(),
            .tile_k = tile_.keys,
            .splits = 1,
            .tasks = params_.all_pieces,
            .threads = std::min(blocks(), multiprocessors_),
            .available_threads = multiprocessors_,
            .key_reuse = 1,
            .fast_bytes = shared_bytes(),
            .flops_per_byte = 206,  // H200: 990 TFLOP/s of bfloat16 against 4.8 TB/s
            .notes = notes()};
  }

  void execute(const Buffers& buffers, std::byte* workspace) const override {
    const Problem& p = problem_;
    if (blocks() == 0) return;
    const ContextScope context(p.device_index);
    check_pointers(buffers, workspace);
    const LoadedKernel& kernel = kernel_.in(context);
    const auto map_of = [&](std::size_t input, const void* data) {
      return inputs_[input]->map(data, workspace, static_cast<CUstream>(buffers.stream), context);
    };
    CUtensorMap map_q = map_of(0, buffers.q);
    // Without keys nothing is loaded, but a map needs memory behind it.
    CUtensorMap map_k = p.seqlen_k == 0 ? map_q : map_of(1, buffers.k);
    CUtensorMap map_v = p.seqlen_k == 0 ? map_q : map_of(2, buffers.v);
    HopperForwardParams params = params_;
    set_pointers(params, buffers);
    params.store_by_tma = out_walkable_ && reinterpret_cast<std::uintptr_t>(buffers.out) % tma_alignment == 0;
    // Where the kernel does not use it, any map will do.
    CUtensorMap map_out = params.store_by_tma ? map_out_.at(buffers.out) : map_q;
    CUtensorMap map_bias = inputs_[3] ? map_of(3, buffers.bias) : map_q;
    void* arguments[] = {&map_q, &map_k, &map_v, &map_out, &map_bias, &params};
    launch(kernel, params.blocks, 128 * (tile_.warpgroups + 1), buffers.stream, arguments);
  }

 private:
  [[nodiscard]] std::vector<std::string> notes() const {
    std::vector<std::string> all;
    for (const auto& input : inputs_)
      if (input && !input->note().empty()) all.push_back(input->note());
    return all;
  }

  [[nodiscard]] int blocks() const { return static_cast<int>(params_.blocks); }

  [[nodiscard]] std::size_t shared_bytes() const {
    const auto panels = [](int size) { return ceil_div(size, 64) * 64; };
    const Index elements =
        static_cast<Index>(tile_.q_buffers) * tile_.rows() * panels(tile_.head_dim) +
        static_cast<Index>(tile_.stages) * tile_.keys * (panels(tile_.head_dim) + panels(tile_.value_dim)) +
        static_cast<Index>(tile_.rows()) * (64 * tile_.out_panels_of_warp() + (inputs_[3] ? tile_.keys : 0));
    return static_cast<std::size_t>(2 * elements);
  }

  HopperForwardVariant variant_;
  const HopperForwardTile& tile_;
  PlannedKernel kernel_;
  int multiprocessors_;
  HopperForwardParams params_{};
  std::array<std::optional<TmaInput>, 4> inputs_;  // q, k, v, a loaded bias; without keys, q
  PlannedTensorMap map_out_;
  bool out_walkable_ = false;  // by TMA
  std::size_t workspace_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Kernel> make_hopper_forward(const Problem& problem, int multiprocessors) {
  return std::make_unique<HopperForward>(problem, multiprocessors);
}

}  // namespace headrace::cuda
