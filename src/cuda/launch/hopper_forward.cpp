// Launches hopper_forward.cuh.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/driver/context.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/driver/module_cache.hpp"
#include "cuda/kernels/hopper_forward_params.hpp"
#include "cuda/launch/cuda_kernel.hpp"
#include "cuda/launch/hopper_forward_source.hpp"
#include "cuda/launch/tma_input.hpp"
#include "describe/dropout.hpp"

namespace headrace::cuda {
namespace {

constexpr int redo_bits = 2048;  // of the kernel's list of tiles to be done again
constexpr int rows_of_warp = 16;

// Of 1 where there is nothing to divide.
Divisor divisor(std::int64_t d) { return Divisor::of(static_cast<unsigned>(std::max<std::int64_t>(d, 1))); }

class HopperForward final : public CudaKernel {
 public:
  HopperForward(const Problem& p, int multiprocessors)
      : CudaKernel(p),
        variant_(hopper_forward_variant(p, multiprocessors)),
        tile_(*variant_.tile),
        source_(hopper_forward_source(p, variant_)),
        multiprocessors_(multiprocessors) {
    const std::int64_t all = ceil_div(p.seqlen_q, 64) * p.batch * p.heads_q;
    constexpr std::int64_t largest = std::numeric_limits<int>::max();
    if (all > largest / 2 || p.seqlen_q > largest / 2 || p.seqlen_k > largest / 2)
      unsupported(
          fmt::format("q: batch {} x heads {} x seqlen_q {} (seqlen_k {}) has too many tiles; on CUDA seqlens and "
                      "the number of tiles of 64 queries must be below 2^30",
                      p.batch, p.heads_q, p.seqlen_q, p.seqlen_k));
    params_ = params(static_cast<int>(ceil_div(p.seqlen_q, tile_.rows())));
    // TMA writes 16 bytes at a time, behind the end of a row too.
    out_walkable_ = p.value_dim % 8 == 0 && tma_obstacle(out(), p.dtype).empty();
    if (all == 0) return;
    const ContextScope context(p.device_index);
    load_kernel(source_);  // compiled now, if it must be
    const auto input = [&](const char* name, std::int64_t rows, std::int64_t heads, std::int64_t size,
                           const RowStrides& strides, bool aligned) {
      inputs_.emplace_back(name, RowsOfHeads{p.batch, rows, heads, size, strides}, p.dtype, aligned, workspace_bytes_);
    };
    input("q", p.seqlen_q, p.heads_q, p.head_dim, p.q, p.q_aligned);
    if (p.seqlen_k == 0) return;
    input("k", p.seqlen_k, p.heads_kv, p.head_dim, p.k, p.k_aligned);
    input("v", p.seqlen_k, p.heads_kv, p.value_dim, p.v, p.v_aligned);
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
    const LoadedKernel& kernel = load_kernel(source_);
    const auto map_of = [&](std::size_t input, const void* data, int box_rows) {
      return inputs_[input].map(data, workspace, static_cast<CUstream>(buffers.stream), box_rows);
    };
    CUtensorMap map_q = map_of(0, buffers.q, 64);
    // Without keys nothing is loaded, but a map needs memory behind it.
    CUtensorMap map_k = p.seqlen_k == 0 ? map_q : map_of(1, buffers.k, tile_.keys);
    CUtensorMap map_v = p.seqlen_k == 0 ? map_q : map_of(2, buffers.v, tile_.keys);
    HopperForwardParams params = params_;
    params.out = buffers.out;
    params.store_by_tma = out_walkable_ && reinterpret_cast<std::uintptr_t>(buffers.out) % tma_alignment == 0;
    // Where the kernel does not use it, any map will do.
    CUtensorMap map_out = params.store_by_tma ? make_tensor_map(out(), p.dtype, buffers.out, rows_of_warp) : map_q;
    params.lse = static_cast<float*>(buffers.lse);
    params.bias = buffers.bias;
    params.mask = buffers.mask;
    params.block_mask = buffers.block_mask;
    params.alibi_slopes = buffers.alibi_slopes;
    params.sinks = buffers.sinks;
    void* arguments[] = {&map_q, &map_k, &map_v, &map_out, &params};
    const CUlaunchConfig config{.gridDimX = static_cast<unsigned>(blocks()),
                                .gridDimY = 1,
                                .gridDimZ = 1,
                                .blockDimX = static_cast<unsigned>(128 * (tile_.warpgroups + 1)),
                                .blockDimY = 1,
                                .blockDimZ = 1,
                                .sharedMemBytes = static_cast<unsigned>(kernel.dynamic_shared),
                                .hStream = static_cast<CUstream>(buffers.stream),
                                .attrs = nullptr,
                                .numAttrs = 0};
    check(driver().cuLaunchKernelEx(&config, kernel.function, arguments, nullptr), "cuLaunchKernelEx");
  }

 private:
  [[nodiscard]] std::vector<std::string> notes() const {
    std::vector<std::string> all;
    for (const TmaInput& input : inputs_)
      if (!input.note().empty()) all.push_back(input.note());
    return all;
  }

  [[nodiscard]] RowsOfHeads out() const {
    const Problem& p = problem_;
    return {p.batch, p.seqlen_q, p.heads_q, p.value_dim, p.out};
  }

  [[nodiscard]] int blocks() const { return static_cast<int>(params_.blocks); }

  [[nodiscard]] std::size_t shared_bytes() const {
    const auto panels = [](int size) { return ceil_div(size, 64) * 64; };
    const Index elements =
        static_cast<Index>(tile_.q_buffers) * tile_.rows() * panels(tile_.head_dim) +
        static_cast<Index>(tile_.stages) * tile_.keys * (panels(tile_.head_dim) + panels(tile_.value_dim)) +
        static_cast<Index>(tile_.rows()) * 64 * tile_.out_panels_of_warp();
    return static_cast<std::size_t>(2 * elements);
  }

  // All but the pointers.
  [[nodiscard]] HopperForwardParams params(int query_tiles) const {
    const Problem& p = problem_;
    const auto pair = [](const PairStrides& s) {
      return HopperForwardParams::Strides4{s.batch, s.head, s.query, s.key};
    };
    HopperForwardParams params{};
    params.out_strides = {p.out.batch, p.out.row, p.out.head};
    params.lse_strides = {p.lse.batch, p.lse.head, p.lse.row};
    params.bias_strides = pair(p.bias);
    params.mask_strides = pair(p.mask);
    params.block_strides = pair(p.block_mask);
    // A block longer than any sequence is as good as one of 2^30.
    params.block_q = divisor(std::min<Index>(p.block_q, Index{1} << 30));
    params.block_k = divisor(std::min<Index>(p.block_k, Index{1} << 30));
    params.alibi_batch = p.alibi_batch_stride;
    params.alibi_head = p.alibi_head_stride;
    params.sinks_stride = p.sinks_stride;
    if (p.batch > 0) {
      constexpr Index limit = Index{1} << 30;
      params.band_lo = static_cast<int>(std::clamp(p.band(0).lo, -limit, limit - 1));
      params.band_hi = static_cast<int>(std::clamp(p.band(0).hi, -limit, limit - 1));
    }
    params.seqlen_q = static_cast<int>(p.seqlen_q);
    params.seqlen_k = static_cast<int>(p.seqlen_k);
    params.value_dim = static_cast<int>(p.value_dim);
    params.heads_q = divisor(p.heads_q);
    params.group = divisor(p.group());
    params.scale = static_cast<float>(p.scale);
    set_softcap(params);
    const Dropout dropout{p.dropout_p, p.seed};
    params.seed = p.seed;
    params.dropout_threshold = dropout.threshold();
    params.dropout_kept = static_cast<float>(dropout.kept_scale());
    params.query_tiles = query_tiles;
    params.pieces = divisor(variant_.paired ? (query_tiles + 1) / 2 : query_tiles);
    params.all_pieces = query_tiles == 0 ? 0 : params.pieces.divisor * static_cast<unsigned>(p.batch * p.heads_q);
    params.blocks = std::min(static_cast<unsigned>(multiprocessors_ * tile_.blocks_per_sm), params.all_pieces);
    const Index of_block = 2 * ceil_div(params.all_pieces, multiprocessors_) + 2;
    while ((of_block >> params.redo_shift) >= redo_bits) ++params.redo_shift;
    return params;
  }

  void set_softcap(HopperForwardParams& params) const {
    const auto narrowed = [](double x) {
      constexpr double largest = std::numeric_limits<float>::max();
      return static_cast<float>(std::clamp(x, -largest, largest));
    };
    // Below 2^-100 a cap makes all scores equal in any precision.
    const double cap = std::max(problem_.softcap, 0x1p-100), ratio = problem_.scale / cap;
    params.softcap = narrowed(cap);
    params.scale_over_softcap = narrowed(ratio);
    params.softcap_straight_below = narrowed(0.5 / std::abs(ratio));
    double factor = cap * ratio / std::log(2.0);
    for (int n = 0; n < 5; ++n, factor *= ratio * ratio) {
      params.softcap_polynomial[n] = narrowed(static_cast<double>(kTanhRatio[n]) * factor);
      if (std::abs(factor) > std::numeric_limits<float>::max()) params.softcap_straight_below = -1.0f;  // never
    }
  }

  HopperForwardVariant variant_;
  const HopperForwardTile& tile_;
  KernelSource source_;
  int multiprocessors_;
  HopperForwardParams params_{};
  std::vector<TmaInput> inputs_;  // q, k, v; without keys, q
  bool out_walkable_ = false;     // by TMA
  std::size_t workspace_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Kernel> make_hopper_forward(const Problem& problem, int multiprocessors) {
  return std::make_unique<HopperForward>(problem, multiprocessors);
}

}  // namespace headrace::cuda
